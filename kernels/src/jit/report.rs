//! The assembler's report: what each kernel of a compilation uses.
//!
//! ```text
//! ptxas info    : Compiling entry function 'dp_norm_forward' for 'sm_90a'
//! ptxas info    : Function properties for dp_norm_forward
//!     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
//! ptxas info    : Used 31 registers, used 1 barriers, 128 bytes smem, 400 bytes cmem[0]
//! ```

/// What one kernel uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// Of each thread.
    pub registers: u64,
    /// Stores and loads of what did not fit in registers, bytes.
    pub spill_bytes: u64,
    /// Local memory of each thread: arrays that were indexed by variables.
    pub stack_bytes: u64,
    /// Static; what a launch adds is not in it.
    pub shared_bytes: u64,
}

/// The usage of the kernel `entry`, if the report names it.
pub fn usage(log: &str, entry: &str) -> Option<Usage> {
    let mut lines = log.lines().skip_while(|l| !l.contains(&format!("Compiling entry function '{entry}'"))).skip(1);
    let mut usage = Usage::default();
    let mut found = false;
    for line in lines.by_ref().take_while(|l| !l.contains("Compiling entry function")) {
        if let Some(spill) = before(line, " bytes spill stores") {
            usage.spill_bytes = spill + before(line, " bytes spill loads").unwrap_or(0);
            usage.stack_bytes = before(line, " bytes stack frame").unwrap_or(0);
        }
        if let Some(registers) = before(line, " registers") {
            usage.registers = registers;
            usage.shared_bytes = before(line, " bytes smem").unwrap_or(0);
            found = true;
        }
    }
    found.then_some(usage)
}

/// The number that stands before `what`.
fn before(line: &str, what: &str) -> Option<u64> {
    let end = line.find(what)?;
    line[..end].rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_of_two_kernels_is_read_kernel_by_kernel() {
        let log = "ptxas info    : 0 bytes gmem\n\
                   ptxas info    : Compiling entry function 'a' for 'sm_80'\n\
                   ptxas info    : Function properties for a\n    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n\
                   ptxas info    : Used 40 registers, used 1 barriers, 128 bytes smem, 400 bytes cmem[0]\n\
                   ptxas info    : Compiling entry function 'b' for 'sm_80'\n\
                   ptxas info    : Function properties for b\n    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
                   ptxas info    : Used 16 registers, 380 bytes cmem[0]\n";
        assert_eq!(usage(log, "a"), Some(Usage { registers: 40, spill_bytes: 16, stack_bytes: 8, shared_bytes: 128 }));
        assert_eq!(usage(log, "b"), Some(Usage { registers: 16, spill_bytes: 0, stack_bytes: 0, shared_bytes: 0 }));
        assert_eq!(usage(log, "c"), None);
    }
}
