//! In which order a stage runs the passes of its micro-batches.

use dplan_ir::plan::Schedule;

/// One pass of one micro-batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Turn {
    Forward(u64),
    Backward(u64),
}

/// The passes of `stage`, in order.
pub fn order(schedule: Schedule, stage: u64, stages: u64, micro_batches: u64) -> Vec<Turn> {
    match schedule {
        Schedule::GPipe => gpipe(micro_batches),
        Schedule::OneFOneB => one_f_one_b(stage, stages, micro_batches),
    }
}

/// ```text
/// stage 0  F0 F1 F2 F3 .. .. B0 B1 B2 B3
/// stage 1  .. F0 F1 F2 F3 B0 B1 B2 B3 ..
/// ```
fn gpipe(micro_batches: u64) -> Vec<Turn> {
    (0..micro_batches).map(Turn::Forward).chain((0..micro_batches).map(Turn::Backward)).collect()
}

/// ```text
/// stage 0  F0 F1 F2 .. .. B0 F3 B1 F4 B2 .. B3 .. B4
/// stage 1  .. F0 F1 .. B0 F2 B1 F3 B2 F4 B3 .. B4 ..
/// stage 2  .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 .. ..
/// ```
fn one_f_one_b(stage: u64, stages: u64, micro_batches: u64) -> Vec<Turn> {
    let ahead = Schedule::OneFOneB.in_flight(stage, stages, micro_batches) - 1;
    let mut turns: Vec<Turn> = (0..ahead).map(Turn::Forward).collect();
    for m in 0..micro_batches - ahead {
        turns.extend([Turn::Forward(m + ahead), Turn::Backward(m)]);
    }
    turns.extend((micro_batches - ahead..micro_batches).map(Turn::Backward));
    turns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pass_runs_once_in_order_and_no_more_are_in_flight_than_planned() {
        for schedule in Schedule::ALL {
            for (stages, micro_batches) in (1..6).flat_map(|p| (1..10).map(move |m| (p, m))) {
                for stage in 0..stages {
                    let (mut forward, mut backward, mut most) = (0, 0, 0);
                    for turn in order(schedule, stage, stages, micro_batches) {
                        match turn {
                            Turn::Forward(m) => {
                                assert_eq!(m, forward);
                                forward += 1;
                            }
                            Turn::Backward(m) => {
                                assert!(m == backward && m < forward, "{schedule:?} {stage}/{stages}");
                                backward += 1;
                            }
                        }
                        most = most.max(forward - backward);
                    }
                    assert_eq!((forward, backward), (micro_batches, micro_batches));
                    assert_eq!(most, schedule.in_flight(stage, stages, micro_batches));
                }
            }
        }
    }
}
