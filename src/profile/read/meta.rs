//! What a profile says about one collective, from whichever of its records says it: arguments of the kernel, of `record_param_comms`, of the
//! `c10d` op, of the back end's range. Each is a [`Meta`] with holes; [`Meta::or`] fills holes from the next best.

use serde_json::{Map, Value};

use crate::profile::classify::{comm_call, element_bytes};
use crate::profile::{Comm, CommOp};

/// What is said of a collective.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Meta {
    pub op: Option<CommOp>,
    pub sent_elements: Option<u64>,
    pub received_elements: Option<u64>,
    pub sent_bytes: Option<u64>,
    pub received_bytes: Option<u64>,
    pub dtype: Option<String>,
    pub group: Option<Vec<u32>>,
    pub group_size: Option<u32>,
    pub peer: Option<u32>,
    pub sequence: Option<u64>,
}

impl Meta {
    /// This, and where it says nothing, `other`.
    pub fn or(self, other: Meta) -> Meta {
        let known = |op: &CommOp| *op != CommOp::Other;
        Meta {
            op: self.op.filter(known).or(other.op.filter(known)).or(self.op).or(other.op),
            sent_elements: self.sent_elements.or(other.sent_elements),
            received_elements: self.received_elements.or(other.received_elements),
            sent_bytes: self.sent_bytes.or(other.sent_bytes),
            received_bytes: self.received_bytes.or(other.received_bytes),
            dtype: self.dtype.or(other.dtype),
            group: self.group.or(other.group),
            group_size: self.group_size.or(other.group_size),
            peer: self.peer.or(other.peer),
            sequence: self.sequence.or(other.sequence),
        }
    }

    /// Writes what is said into `comm`.
    pub fn tell(self, comm: &mut Comm) {
        if let Some(op) = self.op.filter(|op| *op != CommOp::Other) {
            comm.op = op;
        }
        let bytes = self.dtype.as_deref().and_then(element_bytes);
        let sized = |elements: Option<u64>| elements.zip(bytes).map(|(n, b)| n.saturating_mul(b));
        comm.sent_bytes = self.sent_bytes.or(sized(self.sent_elements));
        comm.received_bytes = self.received_bytes.or(sized(self.received_elements));
        comm.elements = self.sent_elements.or(self.received_elements);
        comm.dtype = self.dtype;
        comm.group_size = self.group_size.or(self.group.as_ref().map(|g| g.len() as u32)).filter(|n| *n > 0);
        comm.group = self.group;
        comm.peer = self.peer;
        comm.sequence = self.sequence;
    }

    /// Arguments of a NCCL kernel, of `record_param_comms`, or of an event of our own profile.
    pub fn of_args(args: &Map<String, Value>) -> Meta {
        let number = |key: &str| args.get(key).and_then(whole);
        let text = |key: &str| args.get(key).and_then(Value::as_str).filter(|s| !s.is_empty()).map(str::to_string);
        let op = text("Collective name").or_else(|| text("op")).and_then(|n| comm_call(&n));
        let group = args.get("Process Group Ranks").or_else(|| args.get("group")).and_then(rank_list).or_else(|| {
            let (start, stride, size) = (number("Global rank start")?, number("Global rank stride")?, number("Group size")?);
            (size <= 1 << 20 && stride > 0).then(|| (0..size).map(|i| start.saturating_add(i.saturating_mul(stride)) as u32).collect())
        });
        let to_rank = |n: u64| u32::try_from(n).ok();
        let peer = match op {
            Some(CommOp::Send) => number("Dst Rank"),
            Some(CommOp::Recv) => number("Src Rank"),
            _ => None,
        };
        Meta {
            op,
            sent_elements: number("In msg nelems").or_else(|| number("elements")),
            received_elements: number("Out msg nelems"),
            sent_bytes: number("sent_bytes").or_else(|| number("bytes").filter(|_| op != Some(CommOp::Recv))),
            received_bytes: number("received_bytes").or_else(|| number("bytes").filter(|_| matches!(op, Some(CommOp::Recv | CommOp::AllGather)))),
            dtype: text("dtype"),
            group,
            group_size: number("Group size").and_then(to_rank),
            peer: peer.or_else(|| number("peer")).and_then(to_rank),
            sequence: number("Seq").or_else(|| number("seq")),
        }
    }

    /// The range of a back end: `nccl:all_reduce` with the shapes of what is given (of a receive: of what is got).
    pub fn of_range(op: CommOp, name: &str, args: &Map<String, Value>) -> Meta {
        let given = shapes(args);
        let elements = given.iter().map(|s| s.elements).reduce(u64::saturating_add);
        // `nccl:send 0->1` and `nccl:recv 1<-0` name both sides.
        let peer = name.rsplit(['>', '-']).next().filter(|_| name.contains("->") || name.contains("<-")).and_then(|p| p.trim().parse().ok());
        let mut meta = Meta { op: Some(op), dtype: given.into_iter().find_map(|s| s.dtype), peer, ..Meta::default() };
        match op {
            CommOp::Recv => meta.received_elements = elements,
            _ => meta.sent_elements = elements,
        }
        meta
    }

    /// The op that issues: `c10d::_allgather_base_(output, input, …)`, `c10d::send(tensors, group, peer, tag)`.
    pub fn of_call(name: &str, args: &Map<String, Value>) -> Meta {
        let mut meta = Meta { op: comm_call(name), ..Meta::of_args(args) };
        if name.contains("_base")
            && let [output, input, ..] = shapes(args).as_slice()
        {
            meta.received_elements = meta.received_elements.or(Some(output.elements));
            meta.sent_elements = meta.sent_elements.or(Some(input.elements));
            meta.dtype = meta.dtype.or_else(|| input.dtype.clone());
        }
        if matches!(meta.op, Some(CommOp::Send | CommOp::Recv)) {
            let inputs = args.get("Concrete Inputs").and_then(Value::as_array);
            meta.peer = meta.peer.or_else(|| u32::try_from(whole(inputs?.get(2)?)?).ok());
        }
        meta
    }
}

struct Shape {
    elements: u64,
    dtype: Option<String>,
}

/// Elements of every operand that has a shape; a list of tensors counts as one.
fn shapes(args: &Map<String, Value>) -> Vec<Shape> {
    let dims = args.get("Input Dims").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let types = args.get("Input type").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let shape = |(i, dims): (usize, &Value)| {
        let elements = elements(dims, 0)?;
        let dtype = types.get(i).and_then(Value::as_str).filter(|t| element_bytes(t).is_some());
        Some(Shape { elements, dtype: dtype.map(str::to_string) })
    };
    dims.iter().enumerate().filter_map(shape).collect()
}

fn elements(dims: &Value, depth: usize) -> Option<u64> {
    let dims = dims.as_array().filter(|d| !d.is_empty() && depth < 4)?;
    if dims.iter().all(Value::is_u64) {
        return dims.iter().filter_map(Value::as_u64).try_fold(1u64, u64::checked_mul);
    }
    dims.iter().filter_map(|d| elements(d, depth + 1)).reduce(u64::saturating_add)
}

fn whole(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_str()?.trim().parse().ok())
}

/// `[0, 1]`, or the same in a string; a list that was cut (`[0, 1, ...]`) is no list.
pub fn rank_list(value: &Value) -> Option<Vec<u32>> {
    let mut ranks: Vec<u32> = match value {
        Value::Array(all) => all.iter().map(|r| whole(r).and_then(|r| u32::try_from(r).ok())).collect::<Option<_>>()?,
        Value::String(text) => {
            let inner = text.trim().strip_prefix('[')?.strip_suffix(']')?.trim();
            if inner.is_empty() {
                return None;
            }
            inner.split(',').map(|r| r.trim().parse().ok()).collect::<Option<_>>()?
        }
        _ => return None,
    };
    ranks.sort_unstable();
    ranks.dedup();
    (!ranks.is_empty()).then_some(ranks)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(json: &str) -> Map<String, Value> {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn a_kernel_with_arguments_says_everything() {
        let meta = Meta::of_args(&args(
            r#"{"Collective name": "_allgather_base", "In msg nelems": 100, "Out msg nelems": 400, "Group size": 4, "dtype": "BFloat16",
                "Process Group Ranks": "[3, 1, 5, 7]", "Seq": 9}"#,
        ));
        assert_eq!((meta.op, meta.sent_elements, meta.received_elements), (Some(CommOp::AllGather), Some(100), Some(400)));
        assert_eq!((meta.group, meta.group_size, meta.sequence), (Some(vec![1, 3, 5, 7]), Some(4), Some(9)));
        let long =
            Meta::of_args(&args(r#"{"Process Group Ranks": "[0, 8, ...]", "Global rank start": 0, "Global rank stride": 8, "Group size": 3}"#));
        assert_eq!(long.group, Some(vec![0, 8, 16]), "a list that was cut is given by start and stride");
    }

    #[test]
    fn sizes_come_from_shapes_where_there_are_no_arguments() {
        let range =
            Meta::of_range(CommOp::AllReduce, "gloo:all_reduce", &args(r#"{"Input Dims": [[4, 64, 128], [2]], "Input type": ["float", "float"]}"#));
        assert_eq!((range.sent_elements, range.dtype.as_deref()), (Some(32770), Some("float")));
        let call = Meta::of_call(
            "c10d::_reduce_scatter_base_",
            &args(r#"{"Input Dims": [[41024], [164096], [], []], "Input type": ["float", "float", "", ""]}"#),
        );
        assert_eq!((call.received_elements, call.sent_elements), (Some(41024), Some(164096)));
        let send = Meta::of_call(
            "c10d::send",
            &args(r#"{"Concrete Inputs": ["", "", "2", "0"], "Input Dims": [[[1, 64]], [], [], []], "Input type": ["TensorList", "", "", ""]}"#),
        );
        assert_eq!((send.op, send.peer), (Some(CommOp::Send), Some(2)));
        assert_eq!(Meta::of_range(CommOp::Recv, "nccl:recv 1<-0", &args("{}")).peer, Some(0));
        assert_eq!(Meta::of_range(CommOp::Send, "nccl:send 0->3", &args("{}")).peer, Some(3));
    }

    #[test]
    fn damaged_arguments_are_holes() {
        for text in [
            "{\"Input Dims\": 3}",
            "{\"Input Dims\": [[18446744073709551615, 2]]}",
            "{\"Group size\": -1}",
            "{\"Process Group Ranks\": \"[a]\"}",
            "{\"Group size\": \"x\"}",
        ] {
            let meta = Meta::of_call("c10d::_allgather_base_", &args(text));
            assert_eq!((meta.group, meta.group_size, meta.sent_elements), (None, None, None), "{text}");
        }
    }
}
