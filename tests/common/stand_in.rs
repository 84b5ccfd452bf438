//! Stand-ins for CUDA's driver, NCCL and NVRTC, for processes that run `dplan`: kernels run in the CPU shim.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;

use dplan_kernels::cuda::source;
use dplan_kernels::shim;

/// What a process needs in its environment so that it has a GPU; nothing, said aloud, without a C++ compiler. Kernels are kept between tests.
pub fn stand_in(capability: &str) -> Option<Vec<(&'static str, String)>> {
    // Tests of one process make it one after the other.
    static MAKING: Mutex<()> = Mutex::new(());
    let _making = MAKING.lock().unwrap_or_else(|e| e.into_inner());
    let Some(compiler) = shim::compiler() else {
        eprintln!("SKIPPED: no C++ compiler (set CXX, or install g++)");
        return None;
    };
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("stand_in");
    std::fs::create_dir_all(&folder).unwrap();
    // Kernels that another prelude made are forgotten.
    let host = folder.join("host.h");
    if std::fs::read_to_string(&host).ok().as_deref() != Some(source::HOST) {
        std::fs::remove_dir_all(&folder).unwrap();
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(&host, source::HOST).unwrap();
        // Compiled once, the prelude takes half the time from each kernel.
        let made = folder.join(format!("host.{}.gch", std::process::id()));
        let built = Command::new(&compiler).args(shim::FLAGS).args(["-x", "c++-header"]).arg(&host).arg("-o").arg(&made).output().unwrap();
        if built.status.success() {
            std::fs::rename(made, folder.join("host.h.gch")).unwrap();
        }
    }
    let library = |name: &str| {
        let (own, path) = (folder.join(format!("{name}.{}.so", std::process::id())), folder.join(format!("{name}.so")));
        let source = format!("{}/tests/common/{name}.cpp", env!("CARGO_MANIFEST_DIR"));
        let built = Command::new(&compiler).args(["-shared", "-fPIC", "-O1", "-std=c++17", &source, "-ldl", "-o"]).arg(&own).output().unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        std::fs::rename(&own, &path).unwrap();
        path.display().to_string()
    };
    let (cuda, nvrtc) = (library("libcuda"), library("libnvrtc"));
    Some(vec![
        ("DPLAN_CUDA", cuda.clone()),
        ("DPLAN_NCCL", cuda),
        ("DPLAN_NVRTC", nvrtc),
        ("DPLAN_CACHE", folder.join("cache").display().to_string()),
        ("STAND_IN_FOLDER", folder.display().to_string()),
        ("STAND_IN_PRELUDE", source::DEVICE.len().to_string()),
        ("STAND_IN_CAPABILITY", capability.into()),
        ("STAND_IN_FLAGS", shim::FLAGS.join(" ")),
        ("CXX", compiler.display().to_string()),
    ])
}
