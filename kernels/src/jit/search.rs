//! Where CUDA's libraries may be.

use std::path::{Path, PathBuf};

/// Paths of a library with one of these `names`, in the order in which to try them: the environment's `variable` alone if it is set; else what the loader finds, CUDA's usual
/// places, Python's packages.
pub fn search(variable: &str, names: &[&str]) -> Vec<PathBuf> {
    if let Some(named) = std::env::var_os(variable) {
        return vec![named.into()];
    }
    let mut places: Vec<PathBuf> = names.iter().map(PathBuf::from).collect();
    let roots = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os).map(PathBuf::from).chain([PathBuf::from("/usr/local/cuda")]);
    places.extend(roots.flat_map(|root| names.iter().map(move |n| root.join("lib64").join(n))));
    let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(std::env::var_os).map(PathBuf::from);
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let user = home.iter().map(|home| home.join(".local"));
    // A shim on the path leads to one of pyenv's versions; any other `python3` there lies in its own prefix.
    let shims = std::env::var_os("PYENV_ROOT").map(PathBuf::from).or_else(|| home.as_ref().map(|home| home.join(".pyenv")));
    let versions = shims.iter().flat_map(|root| list(&root.join("versions")));
    let folders = std::env::var_os("PATH").map(|p| std::env::split_paths(&p).collect::<Vec<_>>()).unwrap_or_default();
    let named = folders.into_iter().filter(|folder| folder.join("python3").is_file()).filter_map(|folder| folder.parent().map(Path::to_path_buf));
    let mut prefixes: Vec<PathBuf> = environments.chain(user).chain(named).chain(versions).collect();
    for usual in ["/usr/local", "/usr"].map(PathBuf::from) {
        if !prefixes.contains(&usual) {
            prefixes.push(usual);
        }
    }
    let sites = prefixes.into_iter().flat_map(|prefix| {
        let pythons = list(&prefix.join("lib")).into_iter().filter(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("python")));
        pythons.flat_map(|p| ["site-packages", "dist-packages"].map(|s| p.join(s))).collect::<Vec<_>>()
    });
    let path = std::env::var_os("PYTHONPATH").map(|p| std::env::split_paths(&p).collect::<Vec<_>>()).unwrap_or_default();
    let vendors = sites.chain(path).flat_map(|site| list(&site.join("nvidia")));
    let libraries = vendors.flat_map(|vendor| list(&vendor.join("lib")));
    places.extend(libraries.filter(|p| p.file_name().is_some_and(|n| names.iter().any(|name| n == *name))));
    places
}

/// What a folder holds, in order; nothing if there is no such folder.
fn list(folder: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = std::fs::read_dir(folder).into_iter().flatten().filter_map(|e| Some(e.ok()?.path())).collect();
    found.sort();
    found
}
