//! Time of one op on one device:
//!
//! ```text
//! t = launch + max( flops · (1 + g/m)(1 + g/n)(1 + h/k) / (peak · e) ,  bytes / (bandwidth · e') )
//! ```
//! with `g`, `h`, `e`, `e'` of the device. The achieved rate of a product grows with each of `m`, `n`, `k`, and so does its time. Ops that are no product
//! have the memory term alone.

use crate::machine::DeviceSpec;
use crate::units::Nanos;
use dplan_ir::cost::{OpCost, Unit};
use dplan_ir::dtype::DType;

/// Time of an op with the given cost, whose operands are of type `dtype`.
pub fn op_time(device: &DeviceSpec, dtype: DType, cost: &OpCost) -> Nanos {
    let traffic = device.bandwidth_efficiency.of(device.bandwidth).time(u128::from(cost.bytes));
    let arithmetic = match cost.unit {
        Unit::Matrix { m, n, k } => {
            let (g, h) = (device.matrix_grain, device.matrix_depth_grain);
            let grown = [(m, g), (n, g), (k, h)].iter().fold(u128::from(cost.flops), |flops, &(size, grain)| {
                let size = size.max(1);
                (flops * u128::from(size + grain)).div_ceil(u128::from(size))
            });
            device.matrix_efficiency.of(device.peak.of(dtype)).time(grown)
        }
        Unit::Vector => Nanos::ZERO,
    };
    device.launch + traffic.max(arithmetic)
}

/// Time to copy `bytes` on the device: read once, written once.
pub fn copy_time(device: &DeviceSpec, bytes: u64) -> Nanos {
    device.launch + device.bandwidth_efficiency.of(device.bandwidth).time(2 * u128::from(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::{builtin, known_devices};

    fn product(m: u64, n: u64, k: u64) -> OpCost {
        OpCost { flops: 2 * m * n * k, bytes: 2 * (m * k + n * k + m * n), unit: Unit::Matrix { m, n, k } }
    }

    #[test]
    fn time_of_a_product_grows_with_each_size_and_its_rate_too() {
        for name in known_devices() {
            let device = builtin(name).unwrap().device;
            let time = |m, n, k| op_time(&device, DType::F32, &product(m, n, k));
            for size in [1, 8, 100, 1024, 8192] {
                for (more, less) in [(time(2 * size, 512, 512), time(size, 512, 512)), (time(512, 512, 2 * size), time(512, 512, size))] {
                    assert!(more >= less && more.0 <= 2 * less.0, "{name} {size}: {less} then {more}");
                }
            }
        }
    }

    #[test]
    fn a_large_product_on_an_h100_runs_at_about_700_teraflops() {
        let device = builtin("h100").unwrap().device;
        let cost = product(8192, 8192, 8192);
        let rate = cost.flops as f64 / op_time(&device, DType::Bf16, &cost).seconds();
        assert!((6.8e14..7.5e14).contains(&rate), "{rate:e}");
    }

    #[test]
    fn a_vector_op_is_bound_by_memory() {
        let device = builtin("a100-80g").unwrap().device;
        let cost = OpCost { flops: 1, bytes: 2_039_000_000, unit: Unit::Vector };
        // 1 ms at the full 2039 GB/s, of which 80 % are reached.
        assert_eq!(op_time(&device, DType::F32, &cost), device.launch + Nanos(1_250_000));
    }
}
