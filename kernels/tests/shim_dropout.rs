//! Dropout of the generated kernels is that of CPU ranks, bit by bit, whatever the block: split, padded, in zigzag order, far into a run, in a later micro-batch.

mod shim;

use dplan_ir::dtype::DType;
use dplan_ir::op::Op;
use dplan_ir::order::Order;
use dplan_ir::program::Write;
use dplan_kernels::cuda::Alignment;
use dplan_kernels::shim::Library;
use shim::{Case, Random, TARGET, cpu, folder, make};

/// Label, start, length and logical size of each dim.
type Block = Vec<(char, u64, u64, u64)>;

fn blocks() -> Vec<(Block, Order)> {
    let zigzag = Order::Zigzag { blocks: 3 };
    vec![
        (vec![('a', 0, 3, 3), ('b', 0, 7, 7), ('c', 0, 40, 40)], Order::Straight),
        // Sequences beyond 32 bits lie in the middle of the batch.
        (vec![('a', 1, 4, 5), ('b', 6, 6, 12), ('c', 16, 8, 32)], zigzag),
        (vec![('a', 0, 2, 2), ('b', 3, 3, 6), ('c', 5, 5, 13)], Order::Zigzag { blocks: 1 }),
        // Half of a padded dim.
        (vec![('a', 0, 2, 2), ('b', 0, 4, 4), ('c', 4, 4, 7)], Order::Straight),
        // Heads are split, and what is in them is not; then both are.
        (vec![('a', 0, 2, 2), ('b', 6, 6, 18), ('c', 2, 2, 4), ('d', 0, 12, 12)], zigzag),
        (vec![('a', 0, 2, 2), ('b', 0, 3, 3), ('c', 2, 2, 4), ('d', 3, 6, 9)], Order::Straight),
        (vec![('a', 0, 2, 4), ('b', 5, 5, 10)], Order::Straight),
    ]
}

/// Element type, write and alignment. CPU ranks have the first two; all are held against the reference.
const MODES: [(DType, Write, Alignment); 4] = [
    (DType::F32, Write::Set, Alignment::Packs),
    (DType::F64, Write::Set, Alignment::Elements),
    (DType::Bf16, Write::Add, Alignment::Packs),
    (DType::F16, Write::Set, Alignment::Packs),
];

#[test]
fn kernels_drop_what_cpu_ranks_drop() {
    let Some(dir) = folder("shim_dropout") else { return };
    let mut random = Random(3);
    let mut prepared = Vec::new();
    for (letters, order) in blocks() {
        for (dtype, write, alignment) in MODES {
            let (rank, rate) = (letters.len(), if dtype == DType::F32 { 0.1 } else { 0.5 });
            let ranks = (vec![rank], vec![rank]);
            let case = Case {
                op: Op::Dropout { rate },
                ranks,
                letters: letters.clone(),
                dtype,
                out: None,
                write,
                alignment,
                top_k: 0,
                order,
                target: TARGET,
                tails: Vec::new(),
            };
            prepared.push((make(&case, &mut random), case));
        }
    }
    let library = Library::compile(&dir, "dropout", prepared.iter().flat_map(|(p, _)| &p.routine.launches)).unwrap_or_else(|e| panic!("{e}"));
    let (mut all, mut gone) = (0, 0);
    for (p, case) in &prepared {
        let (outs, ran) = p.run(&library, 1).unwrap_or_else(|e| panic!("{}: {e}", p.name));
        p.check(&outs, 1e-6);
        if case.write == Write::Add {
            continue;
        }
        let found = outs[0].values();
        assert_eq!(ran.unwritten, [0], "{}", p.name);
        (all, gone) = (all + found.len(), gone + found.iter().filter(|&&x| x == 0.0).count());
        if case.dtype == case.dtype.accumulator() {
            let want = cpu(case, &p.ins[0].values());
            assert!(found.iter().zip(&want).all(|(x, y)| x.to_bits() == y.to_bits()), "{}: {found:?} is not {want:?}", p.name);
        }
    }
    assert!(10 * gone > 2 * all && 10 * gone < 6 * all, "{gone} of {all} elements are dropped, at rates of 0.1 and 0.5");
}
