//! The house rules, checked: import directions, file sizes, module documentation, dependencies with a reason.

use std::fs;
use std::path::{Path, PathBuf};

/// Past this many lines a file is a design question.
const MAX_LINES: usize = 600;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn rust_files(dir: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display())) {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(rust_files(&path));
        } else if path.extension().is_some_and(|e| e == "rs") {
            files.push(path);
        }
    }
    files.sort();
    files
}

fn sources() -> Vec<PathBuf> {
    ["ir", "planner", "kernels", "src", "tests", "benches"].iter().flat_map(|d| rust_files(&root().join(d))).collect()
}

fn relative(path: &Path) -> String {
    path.strip_prefix(root()).unwrap().display().to_string()
}

#[test]
fn imports_go_one_way() {
    // ir <- planner, ir <- kernels; only the root package knows all three.
    let forbidden: &[(&str, &[&str])] = &[
        ("ir/src", &["dplan_planner", "dplan_kernels", "dplan::"]),
        ("planner/src", &["dplan_kernels", "dplan::"]),
        ("kernels/src", &["dplan_planner", "dplan::"]),
    ];
    let mut wrong = Vec::new();
    for (dir, names) in forbidden {
        for file in rust_files(&root().join(dir)) {
            let text = fs::read_to_string(&file).unwrap();
            wrong.extend(names.iter().filter(|n| text.contains(**n)).map(|n| format!("{}: mentions {n}", relative(&file))));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn only_the_root_package_touches_the_outside() {
    let outside = ["std::fs", "std::net", "std::time", "std::env", "std::thread", "std::process"];
    let mut wrong = Vec::new();
    for dir in ["ir/src", "planner/src", "kernels/src"] {
        // Machine code is made by compilers and kept on disk.
        let makes_code = |file: &Path| ["kernels/src/jit", "kernels/src/shim"].iter().any(|d| file.starts_with(root().join(d)));
        for file in rust_files(&root().join(dir)).into_iter().filter(|f| !makes_code(f)) {
            let text = fs::read_to_string(&file).unwrap();
            let code = text.split("#[cfg(test)]").next().unwrap_or("");
            wrong.extend(outside.iter().filter(|n| code.contains(**n)).map(|n| format!("{}: uses {n}", relative(&file))));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn files_stay_small_and_open_with_their_model() {
    let mut wrong = Vec::new();
    for file in sources() {
        let text = fs::read_to_string(&file).unwrap();
        let lines = text.lines().count();
        if lines > MAX_LINES {
            wrong.push(format!("{}: {lines} lines, more than {MAX_LINES}", relative(&file)));
        }
        if !text.trim_start().starts_with("//!") {
            wrong.push(format!("{}: no module documentation", relative(&file)));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_dependency_has_its_reason() {
    // In the workspace table each dependency, but our own crates, stands below a comment.
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let table = manifest.split("[workspace.dependencies]").nth(1).expect("a workspace table").split("\n[").next().unwrap();
    let mut wrong = Vec::new();
    let mut above = "";
    for line in table.lines().filter(|l| !l.trim().is_empty()) {
        let bare = !above.starts_with('#') && !line.starts_with('#') && !line.starts_with("dplan-");
        if bare {
            wrong.push(format!("{line}: no comment above says why"));
        }
        above = line;
    }
    for krate in ["ir", "planner", "kernels"] {
        let text = fs::read_to_string(root().join(krate).join("Cargo.toml")).unwrap();
        for line in text.lines().filter(|l| l.contains("version = \"") || l.contains("= \"")) {
            let own = ["name", "description", "edition", "license", "version"].iter().any(|k| line.starts_with(k));
            if !own && !line.contains("workspace = true") {
                wrong.push(format!("{krate}/Cargo.toml: `{line}` does not come from the workspace table"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn nothing_is_left_open_and_no_machine_is_named() {
    let marks = [
        concat!("TO", "DO"),
        concat!("FIX", "ME"),
        concat!("unimplemented", "!("),
        concat!("to", "do!("),
        concat!("/wo", "rk/"),
        concat!("/ho", "me/"),
    ];
    let mut wrong = Vec::new();
    for file in sources() {
        let text = fs::read_to_string(&file).unwrap();
        for (at, line) in text.lines().enumerate() {
            wrong.extend(marks.iter().filter(|m| line.contains(**m)).map(|m| format!("{}:{}: {m}", relative(&file), at + 1)));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// `docs/bugs.md` has a row for each group of bugs; the tests that it names exist, and those named after a group stand in its row.
#[test]
fn every_group_of_bugs_has_its_tests() {
    const GROUPS: usize = 34;
    let table = fs::read_to_string(root().join("docs/bugs.md")).unwrap();
    let rows = table.lines().filter_map(|line| {
        let (group, rest) = line.strip_prefix("| ")?.split_once(" | ")?;
        Some((group.parse::<usize>().ok()?, rest))
    });
    let rows: Vec<(usize, &str)> = rows.collect();
    assert_eq!(rows.iter().map(|r| r.0).collect::<Vec<_>>(), (1..=GROUPS).collect::<Vec<_>>(), "one row for each group, in order");
    let mut wrong = Vec::new();
    let mut named = Vec::new();
    for (group, row) in &rows {
        let before = named.len();
        // Between back-quotes: file::test.
        for (file, test) in row.split('`').skip(1).step_by(2).filter_map(|code| code.split_once(".rs::")) {
            let text = fs::read_to_string(root().join(format!("{file}.rs"))).unwrap_or_default();
            if !tests_of(&text).any(|t| t == test) {
                wrong.push(format!("group {group}: {file}.rs has no test {test}"));
            }
            named.push((*group, test.to_string()));
        }
        if named.len() == before {
            wrong.push(format!("group {group} names no test"));
        }
    }
    for file in rust_files(&root().join("tests")) {
        let text = fs::read_to_string(&file).unwrap();
        for test in tests_of(&text).filter(|t| t.starts_with("group_")) {
            let group = test[6..].split('_').next().and_then(|n| n.parse().ok()).unwrap_or(0);
            if !named.contains(&(group, test.to_string())) {
                wrong.push(format!("{}: {test} is not in the row of its group", relative(&file)));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The names of the tests of a file.
fn tests_of(text: &str) -> impl Iterator<Item = &str> {
    let name = |after: &'_ str| -> Option<(usize, usize)> {
        let start = after.find("fn ")? + 3;
        Some((start, start + after[start..].find('(')?))
    };
    text.split("#[test]").skip(1).filter_map(move |after| name(after).map(|(start, end)| &after[start..end]))
}
