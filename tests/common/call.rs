//! What a stand-in logs.

use dplan::runtime::cuda::load::Primitive;
use dplan::runtime::scratch::Way;

/// A call that was made; streams and events by the order in which the rank made them.
#[derive(Clone, PartialEq, Debug)]
pub enum Call {
    Take(&'static str),
    /// Memory, an event, …: what it was, in the order of making.
    GiveBack(&'static str),
    Record {
        event: usize,
        stream: usize,
    },
    Wait {
        event: usize,
        stream: usize,
    },
    Launch {
        entry: &'static str,
        stream: usize,
    },
    CopyIn {
        to: u64,
        bytes: u64,
        stream: usize,
    },
    CopyOut {
        from: u64,
        bytes: u64,
        stream: usize,
    },
    Rows {
        to: u64,
        bytes: u64,
        stream: usize,
    },
    Zero {
        at: u64,
        bytes: u64,
        stream: usize,
    },
    Errand {
        way: Way,
        address: u64,
        bytes: u64,
        stream: usize,
    },
    Exchange {
        members: Vec<u64>,
        primitive: Primitive,
        elems: u64,
        stream: usize,
    },
    Send {
        to: u64,
        bytes: u64,
        stream: usize,
    },
    Receive {
        from: u64,
        bytes: u64,
        stream: usize,
    },
    BeginCapture,
    EndCapture,
    Replay {
        stream: usize,
    },
    Synchronise,
}
