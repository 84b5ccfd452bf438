//! Built-in devices: the data sheet of each, and what was measured of it.
//!
//! A row holds data-sheet figures and the document they are from. Achieved rates are allowances, said so below ([`Gpu::machine`]); or, where that is asked for and
//! the device, or one of the same chip, was measured, those of [`super::fitted`] ([`Gpu::measured`]).

use super::fitted::{self, Gemm};
use super::{Curves, DeviceSpec, Link, Machine, Peak};
use crate::units::{Bytes, Millionths, Nanos, PerSecond};
use std::sync::Arc;

/// One row of the data-sheet table.
pub(super) struct Gpu {
    pub name: &'static str,
    /// Dense GFLOP/s: f64, f32 (no TF32), bf16, f16.
    gflops: [u64; 4],
    /// HBM, GB/s.
    bandwidth: u64,
    /// What the driver reports as total, MiB (`nvidia-smi`, `rocm-smi`).
    memory: u64,
    /// Links inside a node, GB/s per device and direction.
    intra: u64,
    /// Network, MB/s per device and direction, of the usual server.
    inter: u64,
    /// Link to the host, GB/s per direction.
    host: u64,
    /// Devices of the usual node.
    pub per_node: u64,
    /// Memory of that node's host, GB.
    node_memory: u64,
    /// The device of the same chip whose measurements stand for this one; empty where there is none.
    measured: &'static str,
    /// Data sheet of the device; the server of the network figure.
    pub source: &'static str,
}

/// Links to the host are PCIe ×16, gen 3 to 5, by the same data sheets; GH200 has NVLink-C2C of 900 GB/s both ways (DS-10869), GB200 and GB300 half of theirs for each of
/// two devices. Hosts have what the server of the network figure is sold with: DGX-1 512 GB, DGX A100 1 TB (320 GB model) or 2 TB (640 GB), DGX H100, H200, B200 and B300 2 TB, 480 GB for
/// each Grace CPU (DS-10869, DS-11561), a Frontier node 512 GB; 1 TB, an allowance, for servers of PCIe cards. bf16 on V100 runs on the f32 units. PCIe devices talk over PCIe gen 4 (32 GB/s) or gen 5 (64 GB/s) ×16.
#[rustfmt::skip]
pub(super) const GPUS: [Gpu; 20] = [
    Gpu { name: "v100-16g",  gflops: [7_800, 15_700, 15_700, 125_000],        bandwidth: 900,  memory: 16_160,  intra: 150, inter: 6_250,  host: 16,  per_node: 8, node_memory: 512,     measured: "",          source: "NVIDIA WP-08608 (SXM2, NVLink 2: 6 links of 25 GB/s); DGX-1: 4 × 100 Gb/s EDR for 8" },
    Gpu { name: "v100-32g",  gflops: [7_800, 15_700, 15_700, 125_000],        bandwidth: 900,  memory: 32_510,  intra: 150, inter: 6_250,  host: 16,  per_node: 8, node_memory: 512,     measured: "",          source: "NVIDIA WP-08608 (SXM2, NVLink 2: 6 links of 25 GB/s); DGX-1: 4 × 100 Gb/s EDR for 8" },
    Gpu { name: "a100-40g",  gflops: [9_700, 19_500, 312_000, 312_000],       bandwidth: 1555, memory: 40_536,  intra: 300, inter: 25_000, host: 32,  per_node: 8, node_memory: 1024,    measured: "a100-80g",  source: "NVIDIA DA-06762 (SXM, NVLink 3: 12 links of 25 GB/s); DGX A100: 200 Gb/s HDR each" },
    Gpu { name: "a100-80g",  gflops: [9_700, 19_500, 312_000, 312_000],       bandwidth: 2039, memory: 81_251,  intra: 300, inter: 25_000, host: 32,  per_node: 8, node_memory: 2048,    measured: "a100-80g",  source: "NVIDIA DA-06762 (SXM, NVLink 3: 12 links of 25 GB/s); DGX A100: 200 Gb/s HDR each" },
    Gpu { name: "a100-pcie", gflops: [9_700, 19_500, 312_000, 312_000],       bandwidth: 1935, memory: 81_251,  intra: 32,  inter: 12_500, host: 32,  per_node: 8, node_memory: 1024,    measured: "a100-pcie", source: "NVIDIA PB-10577 (80 GB, 300 W, PCIe 4 ×16); 100 Gb/s for each" },
    Gpu { name: "a800",      gflops: [9_700, 19_500, 312_000, 312_000],       bandwidth: 2039, memory: 81_251,  intra: 200, inter: 25_000, host: 32,  per_node: 8, node_memory: 2048,    measured: "a100-80g",  source: "A100 80 GB with 400 GB/s of NVLink (both directions); 200 Gb/s HDR each" },
    Gpu { name: "h100",      gflops: [34_000, 67_000, 989_400, 989_400],      bandwidth: 3350, memory: 81_559,  intra: 450, inter: 50_000, host: 64,  per_node: 8, node_memory: 2048,    measured: "h100",      source: "NVIDIA DS-10313 (SXM5 80 GB, 700 W, NVLink 4: 18 links of 25 GB/s); DGX H100: 400 Gb/s NDR each" },
    Gpu { name: "h100-96g",  gflops: [34_000, 67_000, 989_400, 989_400],      bandwidth: 2400, memory: 97_871,  intra: 450, inter: 50_000, host: 64,  per_node: 8, node_memory: 2048,    measured: "h100",      source: "the 96 GB HBM2e part limited to 500 W, as the torchtitan paper describes it (arXiv:2410.06511); compute as DS-10313" },
    Gpu { name: "h100-pcie", gflops: [26_000, 51_000, 756_000, 756_000],      bandwidth: 2000, memory: 81_559,  intra: 64,  inter: 25_000, host: 64,  per_node: 8, node_memory: 1024,    measured: "h100",      source: "NVIDIA DS-10313 (PCIe 80 GB, 350 W, PCIe 5 ×16); 200 Gb/s each" },
    Gpu { name: "h800",      gflops: [1_000, 67_000, 989_400, 989_400],       bandwidth: 3350, memory: 81_559,  intra: 200, inter: 50_000, host: 64,  per_node: 8, node_memory: 2048,    measured: "h100",      source: "H100 SXM5 with 400 GB/s of NVLink and 1 TFLOP/s of f64; 400 Gb/s NDR each" },
    Gpu { name: "h200",      gflops: [34_000, 67_000, 989_400, 989_400],      bandwidth: 4800, memory: 143_771, intra: 450, inter: 50_000, host: 64,  per_node: 8, node_memory: 2048,    measured: "h200",      source: "NVIDIA DS-11129 (SXM 141 GB); 400 Gb/s NDR each" },
    Gpu { name: "gh200",     gflops: [34_000, 67_000, 989_400, 989_400],      bandwidth: 4000, memory: 97_871,  intra: 450, inter: 50_000, host: 450, per_node: 4, node_memory: 1920,    measured: "h100",      source: "NVIDIA DS-10869 (96 GB HBM3); quad node, 400 Gb/s NDR each" },
    Gpu { name: "b200",      gflops: [37_000, 75_000, 2_250_000, 2_250_000],  bandwidth: 7700, memory: 183_359, intra: 900, inter: 50_000, host: 64,  per_node: 8, node_memory: 2048,    measured: "b200",      source: "NVIDIA DS-11561 (HGX B200, NVLink 5: 18 links of 50 GB/s); 400 Gb/s NDR each" },
    Gpu { name: "b300",      gflops: [1_300, 77_000, 2_250_000, 2_250_000],   bandwidth: 7700, memory: 275_040, intra: 900, inter: 100_000, host: 64,  per_node: 8, node_memory: 2048,    measured: "b300",     source: "NVIDIA HGX B300 (288 GB); 800 Gb/s each" },
    Gpu { name: "gb200",     gflops: [40_000, 80_000, 2_500_000, 2_500_000],  bandwidth: 8000, memory: 189_471, intra: 900, inter: 50_000, host: 225, per_node: 72, node_memory: 17280,   measured: "gb200",    source: "NVIDIA DS-11561 (GB200 NVL72); 400 Gb/s NDR each" },
    Gpu { name: "gb300",     gflops: [1_300, 80_000, 2_500_000, 2_500_000],   bandwidth: 8000, memory: 284_208, intra: 900, inter: 100_000, host: 225, per_node: 72, node_memory: 17280,   measured: "gb200",   source: "NVIDIA GB300 NVL72 (288 GB); 800 Gb/s each" },
    Gpu { name: "l40s",      gflops: [1_400, 91_600, 362_000, 362_000],       bandwidth: 864,  memory: 46_068,  intra: 32,  inter: 25_000, host: 32,  per_node: 8, node_memory: 1024,    measured: "l40s",      source: "NVIDIA DS-11188 (PCIe 4 ×16); 200 Gb/s each" },
    Gpu { name: "mi250",     gflops: [45_300, 45_300, 181_000, 181_000],      bandwidth: 1638, memory: 65_520,  intra: 150, inter: 25_000, host: 32,  per_node: 8, node_memory: 512,     measured: "",          source: "AMD MI250 data sheet, one of its two dies, which the driver shows as a device; Infinity Fabric 3 links of 50 GB/s; 200 Gb/s each" },
    Gpu { name: "mi300x",    gflops: [81_700, 163_400, 1_307_400, 1_307_400], bandwidth: 5300, memory: 196_592, intra: 448, inter: 50_000, host: 64,  per_node: 8, node_memory: 2048,    measured: "",          source: "AMD 2207109 (7 Infinity Fabric links of 64 GB/s); 400 Gb/s each" },
    Gpu { name: "mi325x",    gflops: [81_700, 163_400, 1_307_400, 1_307_400], bandwidth: 6000, memory: 262_128, intra: 448, inter: 50_000, host: 64,  per_node: 8, node_memory: 2048,    measured: "",          source: "AMD MI325X data sheet (256 GB HBM3E); 400 Gb/s each" },
];

/// Large square bf16 products of vendor libraries reach 70 to 85 % of the data sheet, power-limited on the later parts; half a 128-wide tile is lost on each
/// side; kernels follow one another in about 2.5 µs inside a CUDA graph; STREAM-like kernels reach 80 to 92 % of the data sheet.
const ALLOWANCE: Gemm = Gemm {
    device: "",
    dtype: "bf16",
    efficiency: 750_000,
    grain: 64,
    depth_grain: 64,
    launch: 2_500,
    bandwidth: 800_000,
    rows: 0,
    median: 0,
    worst_tenth: 0,
};

impl Gpu {
    /// By allowances.
    pub fn machine(&self) -> Machine {
        self.with(&ALLOWANCE, Curves::default())
    }

    /// By what was measured of the chip, as far as it was.
    pub fn measured(&self) -> Machine {
        // Curves hold for the links they were measured on.
        let same_links = GPUS.iter().any(|g| g.name == self.measured && g.intra == self.intra);
        let curves = if same_links { fitted::curves(self.measured) } else { Curves::default() };
        self.with(fitted::gemm(self.measured).unwrap_or(&ALLOWANCE), curves)
    }

    fn with(&self, gemm: &Gemm, curves: Curves) -> Machine {
        let [f64, f32, bf16, f16] = self.gflops.map(PerSecond::giga);
        let device = DeviceSpec {
            name: self.name.into(),
            peak: Peak { f64, f32, bf16, f16 },
            matrix_efficiency: Millionths(gemm.efficiency),
            matrix_grain: gemm.grain,
            matrix_depth_grain: gemm.depth_grain,
            bandwidth: PerSecond::giga(self.bandwidth),
            bandwidth_efficiency: Millionths(gemm.bandwidth),
            memory: Bytes(self.memory << 20),
            launch: Nanos(gemm.launch),
            // Allowance: about 0.5 GiB of driver context and modules, as much again for channels of the communicators.
            context: Bytes(1 << 30),
        };
        // Allowance, where no curve was measured: NCCL's ring reaches about 80 % of a link's data sheet; a hop costs 1 to 3 µs inside a node, 5 to 10 µs over InfiniBand.
        let intra = Link { latency: Nanos(2_000), bandwidth: Millionths::percent(80).of(PerSecond::giga(self.intra)) };
        let inter = Link { latency: Nanos(7_000), bandwidth: Millionths::percent(80).of(PerSecond(self.inter * 1_000_000)) };
        // Allowance: pinned copies reach about 80 % of the link, and cost about 10 µs each.
        let host = Link { latency: Nanos(10_000), bandwidth: Millionths::percent(80).of(PerSecond::giga(self.host)) };
        // Allowance, not measured: four disks in a node on four lanes each of PCIe 4 (16 lanes · 16 GT/s · 128/130 / 8 = 31.5 GB/s), of which 80 % is reached, shared by its
        // devices; 100 µs for a queue to the disk and back. A cluster file has the real ones.
        let nvme = Link { latency: Nanos(100_000), bandwidth: PerSecond(25_000_000_000 / self.per_node) };
        // Allowance: a tenth is the system's and the data loader's.
        let host_memory = Some(Bytes(self.node_memory * 900_000_000 / self.per_node));
        Machine { device, per_node: self.per_node, nodes: 1, intra, inter, host, nvme, host_memory, curves: Arc::new(curves) }
    }
}
