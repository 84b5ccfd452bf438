//! Where data lies that tests read in place and that is no part of the repository.

use std::path::{Path, PathBuf};

/// The folder `shared`, found by `DPLAN_SHARED`, or beside this checkout, or beside the main checkout if this is a worktree of it. Where it is
/// absent, the caller's test says so and proves nothing.
pub fn shared() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let main = std::fs::read_to_string(root.join(".git")).ok().and_then(|link| {
        let git = PathBuf::from(link.trim().strip_prefix("gitdir: ")?);
        git.ancestors().nth(3).map(Path::to_path_buf)
    });
    let beside = |checkout: &Path| checkout.parent().map(|p| p.join("shared"));
    let named = std::env::var_os("DPLAN_SHARED").map(PathBuf::from);
    let found = [named, beside(root), main.as_deref().and_then(beside)].into_iter().flatten().find(|p| p.join("oracle").is_dir());
    if found.is_none() {
        eprintln!("SKIPPED: no shared data (set DPLAN_SHARED to the folder that holds oracle/ and models/)");
    }
    found
}
