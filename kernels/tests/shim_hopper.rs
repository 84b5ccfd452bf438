//! Products by Hopper's copy engine and warpgroups, from the text that NVRTC compiles for sm_90a: random shapes against the f64 reference, in other orders of threads
//! and with other numbers of blocks; and with whatever orders them taken out, which must be noticed.

mod shim;

use dplan_ir::dtype::DType;
use dplan_ir::op::Op;
use dplan_ir::order::Order;
use dplan_ir::program::Write;
use dplan_kernels::cuda::arch::Arch;
use dplan_kernels::cuda::product::{TILES, Tiles};
use dplan_kernels::cuda::{Alignment, Launch, Target};
use dplan_kernels::shim::Library;
use shim::{Case, Prepared, Random, folder, letter, make, same_in_orders, spec};

const CASES: u64 = 200;
const WIDE: &[Tiles] = TILES.split_at(1).0;
const SQUARE: &[Tiles] = TILES.split_at(1).1.split_at(1).0;

const MODES: [(DType, Option<DType>, Write); 3] =
    [(DType::Bf16, None, Write::Set), (DType::F16, None, Write::Add), (DType::Bf16, Some(DType::F32), Write::Add)];

/// Operands, the letters whose lengths must be multiples of eight (they are contiguous in an operand), and the tile.
const PRODUCTS: [(&str, &str, &str, &str, &[Tiles]); 7] = [
    ("bsh", "fh", "bsf", "h", SQUARE),
    ("bsf", "fh", "bsh", "fh", WIDE),
    ("bsf", "bsh", "fh", "fh", SQUARE),
    ("hs", "fh", "sf", "sh", WIDE),
    ("gbd", "gds", "gbs", "ds", SQUARE),
    ("bseh", "efh", "bsef", "h", WIDE),
    ("bsef", "efh", "bseh", "hf", SQUARE),
];

fn draw(r: &mut Random, (a, b, c, eights, tiles): (&str, &str, &str, &str, &'static [Tiles])) -> Case {
    let (dtype, out, write) = MODES[r.below(3) as usize];
    let experts = a.len() == 4;
    let letters = "bsehfgd".chars().map(|l| match l {
        'b' if c.starts_with("gb") => letter(l, r.size(140)),
        'b' => letter(l, r.size(2)),
        'e' => letter(l, r.size(5)),
        'g' => letter(l, r.size(3)),
        _ if eights.contains(l) => letter(l, 8 * r.size(24)),
        _ => letter(l, r.size(if l == 's' { 150 } else { 270 })),
    });
    let letters = letters.collect();
    let op = if experts { Op::ExpertEinsum(spec(a, b, c)) } else { Op::Einsum(spec(a, b, c)) };
    let ranks = (if experts { vec![4, 3, 3] } else { vec![a.len(), b.len()] }, vec![c.len()]);
    let target = Target { tiles, ..Target::of(Arch::Sm90a) };
    Case {
        op,
        ranks,
        letters,
        dtype,
        out,
        write,
        alignment: Alignment::Packs,
        top_k: 1 + r.below(3),
        order: Order::Straight,
        target,
        tails: Vec::new(),
    }
}

fn products(p: &Prepared) -> usize {
    p.routine.launches.iter().filter(|l| l.entry == "dp_gemm_wgmma").count()
}

#[test]
fn products_meet_the_reference() {
    let Some(dir) = folder("shim_hopper") else { return };
    let mut random = Random(21);
    let cases: Vec<_> = (0..CASES).map(|i| draw(&mut random, PRODUCTS[i as usize % PRODUCTS.len()])).collect();
    let prepared: Vec<_> = cases.iter().map(|c| make(c, &mut random)).collect();
    let library = Library::compile(&dir, "products", prepared.iter().flat_map(|p| &p.routine.launches)).unwrap_or_else(|e| panic!("{e}"));
    for (case, p) in cases.iter().zip(&prepared) {
        assert_eq!(products(p), 1, "{}: {:?}", p.name, p.routine.launches.iter().map(|l| l.entry).collect::<Vec<_>>());
        let (outs, ran) = p.run(&library, 1).unwrap_or_else(|e| panic!("{}: {e}", p.name));
        p.check(&outs, 1e-5);
        if case.write == Write::Set {
            assert_eq!(ran.unwritten, vec![0], "{}", p.name);
        }
    }
    // Also where one block has all tiles, so that the ring goes on from one to the next.
    same_in_orders(&prepared, &library);
}

/// What orders the asynchronous parts of the text, and what damage makes of it.
const DAMAGES: [(&str, &str); 14] = [
    ("__syncthreads();", ""),
    ("dp_mbar_publish();", ""),
    ("dp_mbar_wait(empty, stage, use ^ 1);", ""),
    ("dp_mbar_wait(empty, stage, use ^ 1);", "dp_mbar_wait(empty, stage, use);"),
    ("dp_mbar_wait(full, stage, use);", ""),
    ("dp_mbar_wait(full, stage, use);", "dp_mbar_wait(full, stage, use ^ 1);"),
    ("dp_mbar_expect(full, stage, (A_TILE + B_TILE) * 2);", ""),
    ("dp_mbar_expect(full, stage, (A_TILE + B_TILE) * 2);", "dp_mbar_expect(full, stage, B_TILE * 2);"),
    ("if (step > 0 && lane == 0) dp_mbar_arrive(empty, before);", ""),
    ("if (steps > 0 && lane == 0) dp_mbar_arrive(empty, before);", ""),
    ("dp_wgmma_fence();", ""),
    ("dp_wgmma_commit();", ""),
    ("dp_wgmma_wait<1>(sum);", ""),
    ("dp_wgmma_wait<0>(sum);", ""),
];

#[test]
fn what_is_taken_out_is_missed() {
    let Some(dir) = folder("shim_hopper") else { return };
    let mut random = Random(22);
    // More steps than the ring has stages, and more tiles than blocks.
    let letters = || vec![letter('b', 1), letter('s', 136), letter('h', 520), letter('f', 130)];
    let op = |tiles| Case {
        op: Op::Einsum(spec("bsh", "fh", "bsf")),
        ranks: (vec![3, 2], vec![3]),
        letters: letters(),
        dtype: DType::Bf16,
        out: None,
        write: Write::Set,
        alignment: Alignment::Packs,
        top_k: 1,
        order: Order::Straight,
        target: Target { tiles, ..Target::of(Arch::Sm90a) },
        tails: Vec::new(),
    };
    let prepared = [WIDE, SQUARE].map(|tiles| make(&op(tiles), &mut random));
    let mut damaged: Vec<(&Prepared, &str, Launch)> = Vec::new();
    for p in &prepared {
        let [launch] = &p.routine.launches[..] else { panic!("one launch") };
        for (what, by) in DAMAGES {
            assert_eq!(launch.text.matches(what).count(), 1, "{what}");
            damaged.push((p, what, Launch { grid: 1, text: launch.text.replace(what, by), ..launch.clone() }));
        }
    }
    let sound = prepared.iter().flat_map(|p| &p.routine.launches);
    let library = Library::compile(&dir, "orders", sound.chain(damaged.iter().map(|(_, _, l)| l))).unwrap_or_else(|e| panic!("{e}"));
    let wants = prepared.each_ref().map(|p| p.run(&library, 1).unwrap_or_else(|e| panic!("{}: {e}", p.name)).0);
    let mut missed = Vec::new();
    for (at, (p, what, launch)) in damaged.iter().enumerate() {
        let want = &wants[at / DAMAGES.len()];
        // Whatever the order of threads.
        for seed in 1..4 {
            match p.run_launches(&library, std::slice::from_ref(launch), seed) {
                Err(error) => println!("{what} {error}"),
                Ok((outs, _)) if outs[0].bytes() != want[0].bytes() => println!("{what} another result"),
                Ok(_) => missed.push(format!("{what}, seed {seed}")),
            }
        }
    }
    assert!(missed.is_empty(), "{} of {} went unnoticed: {missed:?}", missed.len(), damaged.len() * 3);
}
