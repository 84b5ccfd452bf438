//! What a name says: of a kernel, whether it computes or communicates, by which algorithm; of a collective call, which op; of a range, which part of
//! a pipeline schedule.
//!
//! Communication outside NCCL (DeepEP, NVSHMEM, symmetric memory, the all-reduces of inference engines) is known by a table of name parts, which a
//! user extends ([`CommKernels`]). Names never decide more than that: sizes and groups come from metadata.

use super::{CommOp, Error};

/// What bounds a kernel, roughly.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum KernelClass {
    /// Matrix products and convolutions: bound by arithmetic.
    Gemm,
    Attention,
    /// Everything that reads and writes each element about once: bound by memory bandwidth.
    Memory,
    /// A class the name does not tell.
    Other,
}

impl KernelClass {
    pub const ALL: [KernelClass; 4] = [KernelClass::Gemm, KernelClass::Attention, KernelClass::Memory, KernelClass::Other];

    pub fn name(self) -> &'static str {
        match self {
            KernelClass::Gemm => "gemm",
            KernelClass::Attention => "attention",
            KernelClass::Memory => "memory-bound",
            KernelClass::Other => "other",
        }
    }

    pub fn of(kernel: &str) -> KernelClass {
        let lower = kernel.to_ascii_lowercase();
        let any = |parts: &[&str]| parts.iter().any(|p| lower.contains(p));
        if any(&["flash", "fmha", "attention", "sdpa"]) {
            return KernelClass::Attention;
        }
        if any(&[
            "gemm",
            "cutlass",
            "cublas",
            "wgrad",
            "dgrad",
            "conv",
            "scudnn",
            "_mma",
            "wgmma",
            "nvjet",
            "matmul",
            "xmma",
            "winograd",
            "implicit_",
            "cijk_",
        ]) {
            return KernelClass::Gemm;
        }
        if any(&[
            "elementwise",
            "reduce",
            "norm",
            "softmax",
            "copy",
            "fill",
            "multi_tensor",
            "foreach",
            "embedding",
            "gather",
            "scatter",
            "index",
            "cat",
            "bn_",
            "batch_norm",
            "pool",
            "dropout",
            "adam",
            "sgd",
            "lamb",
            "adagrad",
            "transpose",
            "pointwise",
            "triton_",
            "cross_entropy",
            "nll_loss",
            "scan",
            "sort",
            "memset",
            "permute",
            "activation",
            "gelu",
            "relu",
            "rope",
        ]) {
            return KernelClass::Memory;
        }
        KernelClass::Other
    }
}

/// Communication kernels outside NCCL by a part of their name. The first that matches decides; the user's come first.
#[derive(Clone, Debug, Default)]
pub struct CommKernels {
    extra: Vec<(String, CommOp)>,
}

const KNOWN: [(&str, CommOp); 20] = [
    ("deep_ep::internode::get_dispatch_layout", CommOp::Other),
    ("deep_ep::", CommOp::AllToAll),
    ("nvshmem", CommOp::Other),
    ("one_shot_all_reduce", CommOp::AllReduce),
    ("two_shot_all_reduce", CommOp::AllReduce),
    ("multimem_all_reduce", CommOp::AllReduce),
    ("multimem_one_shot", CommOp::AllReduce),
    ("multimem_all_gather", CommOp::AllGather),
    ("multimem_reduce_scatter", CommOp::ReduceScatter),
    ("cross_device_reduce", CommOp::AllReduce),
    ("oneshotallreduce", CommOp::AllReduce),
    ("twoshotallreduce", CommOp::AllReduce),
    ("allreduce_fusion_kernel", CommOp::AllReduce),
    ("quickreduce", CommOp::AllReduce),
    ("userbuffers_fp16_sum", CommOp::AllReduce),
    ("userbuffers_pullsend", CommOp::Send),
    ("userbuffers_pushsend", CommOp::Send),
    ("userbuffers_pushrecv", CommOp::Recv),
    ("mscclpp", CommOp::Other),
    ("mori::", CommOp::AllToAll),
];

impl CommKernels {
    /// Adds a rule written as `PART=OP`.
    ///
    /// # Errors
    /// Says what was found and what would be right.
    pub fn add(&mut self, text: &str) -> Result<(), Error> {
        let wrong = || Error::Rule { text: text.into() };
        let (part, op) = text.split_once('=').ok_or_else(wrong)?;
        let op = CommOp::ALL.into_iter().find(|o| o.name() == op.trim()).ok_or_else(wrong)?;
        if part.trim().is_empty() {
            return Err(wrong());
        }
        self.extra.push((part.trim().to_ascii_lowercase(), op));
        Ok(())
    }

    /// What a kernel communicates, or `None` if it computes.
    pub fn of(&self, kernel: &str) -> Option<CommKernel> {
        if let Some(found) = nccl(kernel) {
            return Some(found);
        }
        let lower = kernel.to_ascii_lowercase();
        let extra = self.extra.iter().map(|(part, op)| (part.as_str(), *op));
        let op = extra.chain(KNOWN).find(|(part, _)| lower.contains(part))?.1;
        Some(CommKernel { op, algorithm: None, protocol: None })
    }
}

/// What the name of a communication kernel says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CommKernel {
    pub op: CommOp,
    pub algorithm: Option<String>,
    pub protocol: Option<String>,
}

/// `ncclKernel_AllReduce_RING_LL_Sum_float(...)` of old, `ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)` of new, `ncclDevKernel_Generic` of ROCm.
fn nccl(kernel: &str) -> Option<CommKernel> {
    let at = ["ncclKernel_", "ncclDevKernel_", "ncclSymkDevKernel_", "ncclSymDevKernel_"].iter().find_map(|p| kernel.find(p).map(|i| i + p.len()))?;
    let word = kernel.get(at..)?.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next()?;
    let mut parts = word.split('_');
    let op = match parts.next()? {
        "AllReduce" => CommOp::AllReduce,
        "AllGather" => CommOp::AllGather,
        "ReduceScatter" => CommOp::ReduceScatter,
        "AllToAll" | "AlltoAll" => CommOp::AllToAll,
        "Broadcast" => CommOp::Broadcast,
        "Reduce" => CommOp::Reduce,
        "SendRecv" => CommOp::SendRecv,
        _ => CommOp::Other,
    };
    let mut found = CommKernel { op, algorithm: None, protocol: None };
    for part in parts {
        match part {
            "RING" | "TREE" | "COLLNET" | "NVLS" | "PAT" => found.algorithm = Some(part.into()),
            "LL" | "LL128" | "SIMPLE" => found.protocol = Some(part.into()),
            _ => {}
        }
    }
    Some(found)
}

/// The op of a collective by any of the names PyTorch and its back ends give it: `allreduce`, `c10d::allreduce_`, `nccl:all_reduce`,
/// `_allgather_base`, `_c10d_functional::reduce_scatter_tensor`, `nccl:send 0->1`.
pub fn comm_call(name: &str) -> Option<CommOp> {
    let name = name.rsplit([':', '/']).next()?.split(' ').next()?;
    let plain: String = name.chars().filter(|c| c.is_ascii_alphabetic()).map(|c| c.to_ascii_lowercase()).collect();
    let starts = |p: &str| plain.starts_with(p);
    Some(match () {
        () if starts("allreduce") => CommOp::AllReduce,
        () if starts("allgather") => CommOp::AllGather,
        () if starts("reducescatter") => CommOp::ReduceScatter,
        () if starts("alltoall") => CommOp::AllToAll,
        () if starts("broadcast") => CommOp::Broadcast,
        () if starts("barrier") || starts("monitoredbarrier") => CommOp::Barrier,
        () if starts("reduce") => CommOp::Reduce,
        () if starts("gather") => CommOp::Gather,
        () if starts("scatter") => CommOp::Scatter,
        () if starts("sendrecv") => CommOp::SendRecv,
        () if starts("send") || starts("isend") => CommOp::Send,
        () if starts("recv") || starts("irecv") => CommOp::Recv,
        () if starts("coalesced") => CommOp::Other,
        () => return None,
    })
}

/// Whether a range is a back end's annotation of one collective: `nccl:all_reduce`, `gloo:send`.
pub fn comm_range(name: &str) -> Option<CommOp> {
    let (backend, _) = name.split_once(':')?;
    matches!(backend, "nccl" | "rccl" | "gloo" | "mpi" | "ucc" | "xccl" | "hccl").then(|| comm_call(name)).flatten()
}

/// Whether an op only issues or awaits communication.
pub fn is_comm_op(name: &str) -> bool {
    name == "record_param_comms"
        || ["c10d::", "_c10d_functional::", "c10d_functional::", "_c10d_functional_autograd::"].iter().any(|p| name.starts_with(p))
}

/// Bytes an element, by any of PyTorch's names of a type.
pub fn element_bytes(dtype: &str) -> Option<u64> {
    let plain: String = dtype.rsplit(':').next()?.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect();
    Some(match plain.as_str() {
        "double" | "float64" | "long" | "longint" | "int64" | "uint64" | "complexfloat" | "f64" | "i64" => 8,
        "float" | "float32" | "int" | "int32" | "uint32" | "f32" | "i32" | "u32" => 4,
        "half" | "float16" | "bfloat16" | "short" | "shortint" | "int16" | "uint16" | "f16" | "bf16" => 2,
        "byte" | "char" | "bool" | "unsignedchar" | "signedchar" | "int8" | "uint8" | "u8" | "i8" => 1,
        "complexdouble" => 16,
        other if other.starts_with("float8") => 1,
        _ => return None,
    })
}

/// A step of a pipeline schedule: `PP:3SEND_F0` is stage 3, `SEND_F`, micro-batch 0.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PipelineStep<'a> {
    pub stage: u32,
    pub op: &'a str,
    pub micro_batch: Option<u32>,
}

pub fn pipeline_step(range: &str) -> Option<PipelineStep<'_>> {
    let text = range.strip_prefix("PP:")?;
    let digits = text.find(|c: char| !c.is_ascii_digit())?;
    let (stage, rest) = text.split_at(digits);
    let letters = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
    let (op, batch) = rest.split_at(letters);
    let micro_batch = if batch.is_empty() { None } else { Some(batch.parse().ok()?) };
    Some(PipelineStep { stage: stage.parse().ok()?, op, micro_batch })
}

/// Whether a range says that the host prepares input.
pub fn is_input(range: &str) -> bool {
    let lower = range.to_ascii_lowercase();
    ["dataloader", "wait_for_batch", "next_batch", "get_batch", "load_batch", "fetch_data", "data_loading"].iter().any(|p| lower.contains(p))
}

/// Whether a range spans one training step.
pub fn is_step(range: &str) -> bool {
    let number = ["ProfilerStep#", "ProfilerStep*#", "step ", "Step ", "step#"].iter().find_map(|p| range.strip_prefix(p));
    number.is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_of_nccl_are_read_in_both_orders_of_their_names() {
        let rules = CommKernels::default();
        let read = |name: &str| rules.of(name).map(|k| (k.op, k.algorithm.unwrap_or_default(), k.protocol.unwrap_or_default()));
        let some = |op, a: &str, p: &str| Some((op, a.to_string(), p.to_string()));
        assert_eq!(read("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)"), some(CommOp::AllReduce, "RING", "LL"));
        assert_eq!(read("ncclDevKernel_AllReduce_Sum_bf16_TREE_LL128(ncclDevKernelArgsStorage<4096ul>)"), some(CommOp::AllReduce, "TREE", "LL128"));
        assert_eq!(read("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)"), some(CommOp::SendRecv, "RING", "SIMPLE"));
        assert_eq!(read("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)"), some(CommOp::Other, "", ""));
        assert_eq!(read("void vllm::cross_device_reduce_1stage<float, 8>(...)"), some(CommOp::AllReduce, "", ""));
        assert_eq!(read("void at::native::vectorized_elementwise_kernel<4>(int)"), None);
        assert_eq!(read("void at::native::reduce_kernel<512, 1>(...)"), None, "a reduction over a tensor is computation");
    }

    #[test]
    fn a_user_adds_kernels_that_communicate() {
        let mut rules = CommKernels::default();
        assert_eq!(rules.of("my_ring_exchange_v2<float>"), None);
        rules.add("Ring_Exchange=send_recv").unwrap();
        assert_eq!(rules.of("my_ring_exchange_v2<float>").map(|k| k.op), Some(CommOp::SendRecv));
        for wrong in ["", "x", "x=allreduce", "=send"] {
            assert!(rules.add(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn collectives_are_known_by_all_their_names() {
        for (name, op) in [
            ("allreduce", CommOp::AllReduce),
            ("c10d::allreduce_", CommOp::AllReduce),
            ("nccl:all_reduce", CommOp::AllReduce),
            ("_c10d_functional::all_reduce", CommOp::AllReduce),
            ("_allgather_base", CommOp::AllGather),
            ("c10d::_allgather_base_", CommOp::AllGather),
            ("nccl:_all_gather_base", CommOp::AllGather),
            ("_reduce_scatter_base", CommOp::ReduceScatter),
            ("c10d::alltoall_base_", CommOp::AllToAll),
            ("all_to_allv", CommOp::AllToAll),
            ("nccl:send 0->1", CommOp::Send),
            ("nccl:recv 1<-0", CommOp::Recv),
            ("c10d::recv_", CommOp::Recv),
            ("broadcast", CommOp::Broadcast),
        ] {
            assert_eq!(comm_call(name), Some(op), "{name}");
        }
        assert_eq!(comm_call("aten::mm"), None);
        assert_eq!(comm_range("gloo:all_gather"), Some(CommOp::AllGather));
        assert_eq!(comm_range("FSDP::all_gather (layers.1)"), None, "a range of FSDP holds copies too");
    }

    #[test]
    fn pipeline_ranges_are_the_tokens_of_a_schedule() {
        let step = |s| pipeline_step(s).map(|p| (p.stage, p.op, p.micro_batch));
        assert_eq!(step("PP:0F0"), Some((0, "F", Some(0))));
        assert_eq!(step("PP:13SEND_F11"), Some((13, "SEND_F", Some(11))));
        assert_eq!(step("PP:5UNSHARD"), Some((5, "UNSHARD", None)));
        for wrong in ["PP:", "PP:F0", "0F0", "PP:7", "PP:99999999999F0", "PP:0F0x"] {
            assert_eq!(step(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn types_have_their_sizes() {
        for (name, bytes) in
            [("Float", 4), ("BFloat16", 2), ("c10::Half", 2), ("long int", 8), ("Float8_e4m3fn", 1), ("unsigned char", 1), ("bf16", 2)]
        {
            assert_eq!(element_bytes(name), Some(bytes), "{name}");
        }
        assert_eq!(element_bytes("TensorList"), None);
    }
}
