//! The real loading path of CUDA's driver, NVRTC, cuBLASLt and NCCL, against C stand-ins: names, structures, arguments, what is given back.

#[path = "common/by_library.rs"]
mod by_library;
mod common;

use std::ffi::c_void;
use std::time::Duration;

use by_library::build;
use dplan::runtime::cuda::disk::{Disk, Parts};
use dplan::runtime::cuda::driver::{Access, Address, Driver, Exchange, Pinned, Queue, Rows, Value};
use dplan::runtime::cuda::gpu::{AbsentError, Gpu, nccl::UniqueId, unique_id};
use dplan::runtime::cuda::load::{Primitive, Reduction};
use dplan::runtime::scratch::{Scratch, Way};
use dplan_ir::dtype::DType;
use dplan_ir::optimizer::{Hyper, StepScalars};
use dplan_ir::program::Write;
use dplan_kernels::cuda::library::{self, FILE, Matmul};
use dplan_kernels::cuda::product::Shape;
use dplan_kernels::cuda::{Alignment, Family, Launch, TensorMap, flat, scalars};
use libloading::Library;

/// The only test of this file: it names the stand-in in the environment of its process.
#[test]
fn the_driver_is_called_as_its_headers_say() {
    let Some(library) = build(&common::scratch("cuda_driver"), "libcuda.so", &["libcuda.cpp", "libcublaslt.cpp"]) else { return };
    let cache = common::scratch("cuda_driver_cache");
    std::fs::write(cache.join(FILE), "sm_90a f32 any 2 2 3 1 2.0 1.0 # measured here\n").unwrap();
    // SAFETY: this process has no other thread that reads its environment.
    unsafe {
        std::env::set_var("DPLAN_CUDA", &library);
        std::env::set_var("DPLAN_NCCL", &library);
        std::env::set_var("DPLAN_CUBLASLT", &library);
        std::env::set_var("DPLAN_CACHE", &cache);
    }
    let mut gpu = match Gpu::open(0, Duration::from_secs(5)) {
        Err(AbsentError::Nvrtc(error)) => return eprintln!("SKIPPED: {error}"),
        other => other.unwrap_or_else(|e| panic!("{e}")),
    };
    assert!(matches!(Gpu::open(1, Duration::from_secs(5)), Err(AbsentError::Device(why)) if why.contains("which has 1")));
    gpu.join(UniqueId(unique_id().unwrap().0), 0, 1).unwrap();
    // SAFETY: its initialisers are those of C++.
    let stand_in = unsafe { Library::new(&library).unwrap() };
    let live = || ask(&stand_in, "stand_in_live");
    let before = live();
    drive(&mut gpu, &stand_in);
    assert_eq!(live(), before, "something was not given back");
    members_keep_their_order(&stand_in);
    assert_eq!(live(), before, "a communicator was not given back");
    what_fails_is_given_back();
    assert_eq!(live(), before, "a communicator that failed was not given back");
    // Without the library there are generated kernels alone.
    // SAFETY: as above.
    unsafe { std::env::set_var("DPLAN_CUBLASLT", "/nowhere/libcublasLt.so") };
    let without = Gpu::open(0, Duration::from_secs(5)).unwrap();
    let why = without.lacks().map(ToString::to_string).unwrap_or_default();
    assert!(why.contains("cuBLASLt was not found: all products are computed by generated kernels") && why.contains("/nowhere"), "{why}");
    assert_eq!(without.target().beside, library::Library::Absent);
    assert!(without.products().ends_with(", generated"), "{}", without.products());
    assert_eq!(gpu.allocate(1 << 50).unwrap_err().to_string(), "cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY");
}

/// What one of the stand-in's own functions says.
fn ask(stand_in: &Library, function: &str) -> i32 {
    // SAFETY: the functions have this type.
    unsafe { stand_in.get::<unsafe extern "C" fn() -> i32>(function.as_bytes()).unwrap()() }
}

/// NCCL orders a group by the keys that its members come with, not as anybody lists them.
fn members_keep_their_order(stand_in: &Library) {
    let mut gpu = Gpu::open(0, Duration::from_secs(5)).unwrap();
    gpu.join(unique_id().unwrap(), 2, 4).unwrap();
    for (members, key) in [(&[0, 2, 3][..], 1), (&[3, 1, 2], 2), (&[2, 0], 0)] {
        let part = gpu.split(0, Some(members)).unwrap().unwrap();
        let (color, position) = (ask(stand_in, "stand_in_color"), ask(stand_in, "stand_in_key"));
        assert_eq!((color, position), (members[0] as i32, key), "of {members:?}");
        gpu.leave(part).unwrap();
    }
}

fn what_fails_is_given_back() {
    // One that met nobody, with an id that is not theirs.
    let mut gpu = Gpu::open(0, Duration::from_millis(50)).unwrap();
    assert_eq!(gpu.split(0, None).unwrap_err().to_string(), "ncclCommSplit: this rank has met no others");
    assert!(gpu.join(UniqueId([0; 128]), 0, 1).unwrap_err().to_string().contains("ncclInvalidArgument"));
    drop(gpu);
    // One whose peers do not come.
    let mut gpu = Gpu::open(0, Duration::from_millis(50)).unwrap();
    gpu.join(unique_id().unwrap(), 13, 14).unwrap();
    assert!(gpu.split(0, Some(&[13])).unwrap_err().to_string().contains("peers did not come"));
}

fn drive(gpu: &mut Gpu, stand_in: &Library) {
    let (device, pinned) = (gpu.allocate(4096).unwrap(), gpu.pin(4096).unwrap());
    let (stream, event) = (gpu.create_stream().unwrap(), gpu.create_event().unwrap());
    // A kernel: the clip factor of √16 with a limit of 1.
    let routine = flat::clip_scale(DType::F32, DType::F32);
    let launch = &routine.launches[0];
    let kernel = gpu.load(launch).unwrap();
    gpu.pinned(pinned)[..4].copy_from_slice(&16f32.to_le_bytes());
    let hyper = Hyper { lr: 0.0, beta1: 0.0, beta2: 0.0, eps: 0.0, weight_decay: 0.0, momentum: 0.0, clip: 1.0 };
    let scalars: Vec<u8> = scalars(&StepScalars::new(hyper, 1, 1.0)).iter().flat_map(|x| x.to_le_bytes()).collect();
    gpu.pinned(pinned)[256..256 + scalars.len()].copy_from_slice(&scalars);
    gpu.copy_in(device, pinned, 0, 512, stream).unwrap();
    gpu.record(event, stream).unwrap();
    gpu.wait(stream, event).unwrap();
    let memory = |at: u64, access: Access| Value::Memory { at: device.plus(at), bytes: 256, access };
    gpu.launch(kernel, launch, &[memory(0, Access::Read), memory(512, Access::Write), memory(256, Access::Read)], stream).unwrap();
    let read = |gpu: &mut Gpu, at: u64| -> f32 {
        gpu.copy_out(pinned, 0, device.plus(at), 4, stream).unwrap();
        gpu.synchronise().unwrap();
        f32::from_le_bytes(gpu.pinned(pinned)[..4].try_into().unwrap())
    };
    assert_eq!(read(gpu, 512), (1.0 / (4.0 + 1e-6)) as f32);
    // The same, with more shared memory than a kernel has unasked, and with more than the device has.
    let [large, too_large] = [64, 100].map(|kib| Launch { shared: kib * 1024, ..launch.clone() });
    let of_large = gpu.load(&large).unwrap();
    gpu.zero(device.plus(512), 4, stream).unwrap();
    gpu.launch(of_large, &large, &[memory(0, Access::Read), memory(512, Access::Write), memory(256, Access::Read)], stream).unwrap();
    assert_eq!(read(gpu, 512), (1.0 / (4.0 + 1e-6)) as f32);
    gpu.unload(of_large).unwrap();
    assert!(gpu.load(&too_large).is_err());
    gives_tensors(gpu, device, pinned, stream);
    multiplies(gpu, device, pinned, stream, stand_in);
    replays(gpu, device, pinned, stream);
    reaches_a_file(gpu, pinned, stream);
    // Rows: the second of each pair of bytes.
    let bytes: Vec<u8> = (0..16).collect();
    gpu.pinned(pinned)[..16].copy_from_slice(&bytes);
    gpu.copy_in(device, pinned, 0, 16, stream).unwrap();
    gpu.zero(device.plus(1024), 8, stream).unwrap();
    gpu.copy_rows(Rows { from: device.plus(1), from_pitch: 2, to: device.plus(1024), to_pitch: 1, width: 1, rows: 4 }, stream).unwrap();
    gpu.copy_out(Pinned(pinned.0), 0, device.plus(1024), 8, stream).unwrap();
    gpu.synchronise().unwrap();
    assert_eq!(gpu.pinned(pinned)[..8], [1, 3, 5, 7, 0, 0, 0, 0]);
    // Groups of one rank.
    assert_eq!(gpu.split(0, None).unwrap(), None);
    let part = gpu.split(1, Some(&[0])).unwrap().unwrap();
    let from = |at: u64| Address(device.0 + at);
    for primitive in
        [Primitive::AllReduce(Reduction::Sum), Primitive::ReduceScatter(Reduction::Max), Primitive::AllGather, Primitive::AllToAll, Primitive::Shift]
    {
        gpu.exchange(part, Exchange { primitive, elems: 1, dtype: DType::F32, from: from(512), to: from(2048) }, stream).unwrap();
        assert_eq!(read(gpu, 2048), (1.0 / (4.0 + 1e-6)) as f32);
        gpu.zero(from(2048), 4, stream).unwrap();
    }
    gpu.send(part, 0, device, 4, stream).unwrap();
    assert_eq!(gpu.send(part, 1, device, 4, stream).unwrap_err().to_string(), "ncclSend: ncclInvalidArgument");
    gpu.receive(part, 0, device, 4, stream).unwrap();
    gpu.leave(part).unwrap();
    let part = gpu.split(2, Some(&[0])).unwrap().unwrap();
    gpu.abort(part).unwrap();
    gpu.unload(kernel).unwrap();
    gpu.destroy_event(event).unwrap();
    gpu.destroy_stream(stream).unwrap();
    gpu.unpin(pinned).unwrap();
    gpu.free(device).unwrap();
}

/// What is captured is done when it is replayed, as often as that is.
fn replays(gpu: &mut Gpu, device: Address, pinned: Pinned, stream: Queue) {
    gpu.pinned(pinned)[..2].copy_from_slice(&[1, 2]);
    gpu.begin_capture(stream).unwrap();
    assert_eq!(gpu.begin_capture(stream).unwrap_err().call, "cuStreamBeginCapture");
    gpu.copy_in(device, pinned, 0, 1, stream).unwrap();
    gpu.copy_out(pinned, 1, device, 1, stream).unwrap();
    let graph = gpu.end_capture(stream).unwrap();
    assert_eq!(gpu.pinned(pinned)[..2], [1, 2], "nothing is done before");
    for first in [3, 4] {
        gpu.pinned(pinned)[0] = first;
        gpu.replay(graph, stream).unwrap();
        gpu.synchronise().unwrap();
        assert_eq!(gpu.pinned(pinned)[..2], [first; 2]);
    }
    gpu.discard(graph).unwrap();
}

/// A product that the table gives to cuBLASLt is computed by it, on the stream, in working memory that ends with the stream.
fn multiplies(gpu: &mut Gpu, device: Address, pinned: Pinned, stream: Queue, stand_in: &Library) {
    assert!(
        gpu.lacks().is_none() && gpu.products().contains("12, 9, 1") && gpu.products().contains("sm_90a f32 any 2 2 3 1 2 1"),
        "{}",
        gpu.products()
    );
    // [1 2 3; 4 5 6] by what adds the first and last of three, and takes the second twice.
    let shape = Shape { m: 2, n: 2, k: 3, z: 1, a: [3, 1], b: [1, 3], out: [2, 1], batch: [0; 3] };
    let product = Matmul::new(&shape, [DType::F32; 2], Write::Set, Alignment::Packs).unwrap();
    let target = gpu.target();
    assert!(target.beside.takes(target.arch, &product) && !target.beside.takes(target.arch, &Matmul { elem: DType::F64, ..product }));
    let launch = Launch {
        family: Family::Gemm,
        entry: "dp_gemm_plain",
        text: String::new(),
        grid: 1,
        threads: 1,
        shared: 0,
        args: Vec::new(),
        instead: Some(product),
    };
    let kernel = gpu.load(&launch).unwrap();
    for (i, v) in [1f32, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 2.0, 0.0].iter().enumerate() {
        gpu.pinned(pinned)[i * 4..][..4].copy_from_slice(&v.to_le_bytes());
    }
    gpu.copy_in(device, pinned, 0, 56, stream).unwrap();
    let matrix = |at: u64, access: Access| Value::Memory { at: device.plus(at), bytes: 24, access };
    gpu.launch(kernel, &launch, &[matrix(0, Access::Read), matrix(32, Access::Read), matrix(3072, Access::Write)], stream).unwrap();
    gpu.copy_out(pinned, 0, device.plus(3072), 16, stream).unwrap();
    gpu.synchronise().unwrap();
    let found: Vec<f32> = gpu.pinned(pinned)[..16].chunks(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect();
    assert_eq!(found, [4.0, 4.0, 10.0, 10.0]);
    // SAFETY: the function has this type.
    assert_eq!(unsafe { stand_in.get::<unsafe extern "C" fn(*const c_void) -> i32>(b"stand_in_stream_is").unwrap()(stream.0 as *const c_void) }, 1);
    assert!(gpu.launch(kernel, &launch, &[Value::Int(1)], stream).is_err());
    let wrong = Launch { instead: Some(Matmul { elem: DType::I32, ..product }), ..launch };
    assert!(gpu.load(&wrong).unwrap_err().to_string().contains("cublasLtMatrixLayoutCreate"));
    gpu.unload(kernel).unwrap();
    assert_eq!(gpu.unload(kernel).unwrap_err().why, "unloaded twice");
    gpu.ask_library(library::Library::Absent);
    assert_eq!(gpu.target().beside, library::Library::Absent);
    let products = gpu.products();
    assert!(products.starts_with("NVRTC ") && products.ends_with(", generated"), "{products}");
}

/// What goes to a file comes back from there, in pieces.
fn reaches_a_file(gpu: &mut Gpu, pinned: Pinned, stream: Queue) {
    let device = gpu.allocate(4096).unwrap();
    let bytes: Vec<u8> = (0..4096u32).map(|i| (i * 7 % 251) as u8).collect();
    let (pieces, disks) = (gpu.pin(Parts::pinned_bytes(1024)).unwrap(), gpu.create_stream().unwrap());
    let events: Vec<_> = (0..Parts::EVENTS).map(|_| gpu.create_event().unwrap()).collect();
    let file = Scratch::new(&common::scratch("cuda_driver_file"), 0, 10_000).unwrap();
    let mut disk = Disk::new(gpu, file, &Parts { pieces, piece: 1024, stream: disks, events: events.clone() });
    for way in [Way::Out, Way::In] {
        gpu.pinned(pinned).copy_from_slice(&bytes);
        disk.begin();
        if way == Way::Out {
            gpu.copy_in(device, pinned, 0, 4096, stream).unwrap();
        } else {
            gpu.zero(device, 4096, stream).unwrap();
        }
        disk.carry(gpu, way, device, 100, 4096, stream).unwrap();
        gpu.copy_out(pinned, 0, device, 4096, stream).unwrap();
        gpu.synchronise().unwrap();
        disk.check().unwrap();
        assert!(gpu.pinned(pinned) == bytes, "{way:?}");
    }
    disk.begin();
    disk.carry(gpu, Way::In, device, 1 << 40, 1, stream).unwrap();
    gpu.synchronise().unwrap();
    let error = disk.check().unwrap_err().to_string();
    assert!(error.starts_with("pread: its scratch file: "), "{error}");
    assert_eq!(disk.close(), None, "no errand is under way");
    events.into_iter().for_each(|event| gpu.destroy_event(event).unwrap());
    gpu.destroy_stream(disks).unwrap();
    gpu.unpin(pieces).unwrap();
    gpu.free(device).unwrap();
}

/// A kernel gets a tensor as the driver encodes it: where it lies and how.
fn gives_tensors(gpu: &mut Gpu, device: Address, pinned: Pinned, stream: Queue) {
    let map = TensorMap::new([40, 3, 2], [48, 160]).unwrap();
    assert_eq!(map, TensorMap { dims: [40, 3, 2], pitches: [96, 320] });
    assert_eq!(map.bytes(), 80 + 2 * 96 + 320);
    for (dims, steps) in [([40, 3, 1], [44, 0]), ([40, 0, 1], [48, 0]), ([1 << 31, 3, 1], [48, 0]), ([40, 3, 2], [48, 0])] {
        assert_eq!(TensorMap::new(dims, steps), None, "{dims:?} {steps:?}");
    }
    let text = "constexpr int THREADS = 32;\nDP_KERNEL(dp_tensor)(DP_TENSOR(t), DP_OUT(u64) out) {}\n".to_string();
    let launch = Launch { family: Family::Gemm, entry: "dp_tensor", text, grid: 1, threads: 32, shared: 0, args: Vec::new(), instead: None };
    let kernel = gpu.load(&launch).unwrap();
    let tensor = |at: Address| Value::Tensor { at, bytes: map.bytes(), map };
    let out = Value::Memory { at: device.plus(1024), bytes: 48, access: Access::Write };
    gpu.launch(kernel, &launch, &[tensor(device.plus(32)), out], stream).unwrap();
    gpu.copy_out(pinned, 0, device.plus(1024), 48, stream).unwrap();
    gpu.synchronise().unwrap();
    let words: Vec<u64> = gpu.pinned(pinned)[..48].chunks(8).map(|c| u64::from_le_bytes(c.try_into().unwrap())).collect();
    assert_eq!(words, [device.0 + 32, 40, 3, 2, 96, 320]);
    let error = gpu.launch(kernel, &launch, &[tensor(device.plus(8)), out], stream).unwrap_err().to_string();
    assert!(error.starts_with("cuTensorMapEncodeTiled: ") && error.contains("[40, 3, 2]"), "{error}");
    gpu.unload(kernel).unwrap();
}
