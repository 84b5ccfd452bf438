//! The order of passes is that of PyTorch's pipeline schedules, by the tables they were dumped to.

mod common;

use common::reference;
use dplan_ir::pipeline::Pipeline;
use dplan_ir::plan::Schedule;

#[test]
fn orders_of_passes_are_those_of_pytorch() {
    let Some(folder) = reference("traces/pipelining_csv") else { return };
    for (name, schedule, stages, virtual_stages, micro_batches) in [
        ("1f1b_pp4_mb8", Schedule::OneFOneB, 4, 1, 8),
        ("interleaved1f1b_pp4_vpp2_mb4", Schedule::Interleaved, 4, 2, 4),
        ("interleaved1f1b_pp8_vpp2_mb16", Schedule::Interleaved, 8, 2, 16),
        ("zbv_pp4_mb8", Schedule::ZbV, 4, 2, 8),
    ] {
        let text = std::fs::read_to_string(folder.join(format!("{name}_compute_only.csv"))).unwrap();
        let pipeline = Pipeline { schedule, stages, virtual_stages, micro_batches };
        assert_eq!(pipeline.refusal(), None, "{name}");
        assert_eq!(text.lines().count() as u64, stages, "{name}");
        for (stage, line) in text.lines().enumerate() {
            let own: Vec<u64> = pipeline.virtual_stages_of(stage as u64).collect();
            let passes = pipeline.turns(stage as u64).into_iter();
            let ours: Vec<String> = passes.map(|t| format!("{}{}{}", own[t.nth as usize], t.pass.letter(), t.micro_batch)).collect();
            let theirs: Vec<&str> = line.split(',').filter(|pass| !pass.is_empty()).collect();
            assert_eq!(ours, theirs, "{name}, stage {stage}");
        }
    }
}
