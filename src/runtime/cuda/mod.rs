//! Ranks on GPUs.
//!
//! [`load`] turns each instruction of a stage into an [`load::Action`]: kernels with the byte ranges they work on, copies and fills of the driver, or a
//! collective of NCCL with the kernels that pack and unpack around it. What follows a product element by element is done by the product's kernel where nobody sees the
//! difference ([`fuse`]), and ops along rows by one kernel ([`rows`]). A [`rank::Rank`] makes the calls that this takes ([`step`]) of a [`driver::Driver`], which is a
//! [`gpu::Gpu`], or a stand-in that tests give. [`session::Session`] runs steps on the ranks of a process; [`start`] is how processes find each other.
//! Nothing is decided here that the program did not decide.

use dplan_ir::dtype::DType;
use dplan_ir::plan::Plan;
use dplan_ir::program::Updates;

pub mod disk;
pub mod driver;
pub mod flight;
pub mod fuse;
pub mod gpu;
pub mod groups;
pub mod load;
pub mod rank;
pub mod rows;
pub mod session;
pub mod solo;
pub mod start;
pub mod step;
pub mod timing;
pub mod together;

/// Why only CPU ranks run a plan, if so.
pub fn refusal(plan: &Plan) -> Option<String> {
    if plan.schedule.updates() == Updates::MicroBatch {
        let schedule = plan.schedule.name();
        return Some(format!("an update behind each micro-batch (schedule {schedule}) takes scalars of its own, and a step on a GPU has one set"));
    }
    if plan.compressed().is_some() {
        return Some(format!("gradients are compressed (wire {}) on CPU ranks alone; plan with wire full or bf16", plan.wire.name()));
    }
    match plan.compute {
        DType::F32 | DType::Bf16 => None,
        DType::F16 | DType::F64 | DType::I32 => {
            Some(format!("{} kernels are on CPU ranks alone; compile with --precision bf16 or f32", plan.compute))
        }
    }
}
