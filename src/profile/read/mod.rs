//! Files into a [`Profile`]: the format is recognised by content, ranks are read side by side, and each finds its number.

mod draft;
mod meta;
mod nsys;
mod nsys_csv;
mod stream;
mod text;
mod trace;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read, Seek};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::classify::CommKernels;
use super::{Error, Kind, Profile};
use trace::Found;

/// Reads the profiles of one run: files, or folders of them. In a folder, what is no profile is passed over with a note.
///
/// # Errors
/// Names the file, the place in it where there is one, and what was wrong.
pub fn read(paths: &[PathBuf], rules: &CommKernels) -> Result<Profile, Error> {
    let files = expand(paths)?;
    if files.is_empty() {
        return Err(Error::Nothing);
    }
    let mut profile = Profile::default();
    let mut found = Vec::new();
    for (file, result) in files.iter().zip(read_all(&files, rules)) {
        match result {
            Ok(ranks) => {
                // A name with one number says nothing of several ranks.
                let named = rank_of_file(&file.path).filter(|_| ranks.len() == 1);
                found.extend(ranks.into_iter().map(|mut f| {
                    f.rank.source = shown(&file.path);
                    f.number = f.number.or(named);
                    f
                }));
            }
            Err(Error::NotAProfile { file: name, found }) if file.in_folder => {
                profile.notes.push(format!("{name} is no profile ({found}) and is left out"))
            }
            Err(error) => return Err(error),
        }
    }
    let file = files.first().map_or_else(String::new, |f| shown(&f.path));
    number(found, &file, &mut profile)?;
    Ok(profile)
}

/// Reads one trace or CSV from memory; `name` is what messages call it, and what tells the rank where the content does not.
///
/// # Errors
/// Names the place and what was wrong.
pub fn parse(name: &str, content: &[u8], rules: &CommKernels) -> Result<Profile, Error> {
    let mut found = read_stream(name, &content[..content.len().min(16)], content, rules)?;
    let named = rank_of_file(Path::new(name)).filter(|_| found.len() == 1);
    for f in &mut found {
        f.rank.source = name.into();
        f.number = f.number.or(named);
    }
    let mut profile = Profile::default();
    number(found, name, &mut profile)?;
    Ok(profile)
}

struct Input {
    path: PathBuf,
    in_folder: bool,
}

fn expand(paths: &[PathBuf]) -> Result<Vec<Input>, Error> {
    let mut files = Vec::new();
    for path in paths {
        if !path.is_dir() {
            files.push(Input { path: path.clone(), in_folder: false });
            continue;
        }
        let io = |source| Error::Io { file: shown(path), source };
        let mut inside = Vec::new();
        for entry in std::fs::read_dir(path).map_err(io)? {
            let entry = entry.map_err(io)?.path();
            let name = entry.file_name().map(|n| n.to_string_lossy().to_lowercase()).unwrap_or_default();
            if entry.is_file() && [".json", ".json.gz", ".sqlite", ".csv"].iter().any(|e| name.ends_with(e)) {
                inside.push(entry);
            }
        }
        if inside.is_empty() {
            return Err(Error::EmptyFolder { folder: shown(path) });
        }
        inside.sort();
        files.extend(inside.into_iter().map(|path| Input { path, in_folder: true }));
    }
    Ok(files)
}

/// Each file's ranks, in the order of the files.
fn read_all(files: &[Input], rules: &CommKernels) -> Vec<Result<Vec<Found>, Error>> {
    let workers = std::thread::available_parallelism().map_or(1, usize::from).min(files.len());
    let next = AtomicUsize::new(0);
    let done: Mutex<Vec<(usize, Result<Vec<Found>, Error>)>> = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    let Some(file) = files.get(i) else { return };
                    let read = read_file(&file.path, rules);
                    done.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push((i, read));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    done.sort_by_key(|(i, _)| *i);
    done.into_iter().map(|(_, read)| read).collect()
}

fn read_file(path: &Path, rules: &CommKernels) -> Result<Vec<Found>, Error> {
    let file = shown(path);
    let io = |source| Error::Io { file: file.clone(), source };
    let mut input = File::open(path).map_err(io)?;
    let mut first = [0u8; 16];
    let length = fill(&mut input, &mut first).map_err(io)?;
    input.rewind().map_err(io)?;
    let first = &first[..length];
    if first.starts_with(b"SQLite format 3") {
        return nsys::read(&file, path, rules);
    }
    if path.extension().is_some_and(|e| e == "nsys-rep" || e == "qdrep") {
        let found = format!("a closed format; run `nsys export --type sqlite {file}` and give the .sqlite");
        return Err(Error::NotAProfile { file, found });
    }
    read_stream(&file, first, input, rules)
}

/// A trace or a CSV, gzipped or not; `first` is how it begins.
fn read_stream(file: &str, first: &[u8], input: impl Read, rules: &CommKernels) -> Result<Vec<Found>, Error> {
    if first.starts_with(&[0x1f, 0x8b]) {
        let text = flate2::read::MultiGzDecoder::new(BufReader::with_capacity(128 << 10, input));
        return trace::read(file, text, rules);
    }
    match first.iter().find(|b| !b.is_ascii_whitespace()) {
        None => Err(Error::Empty { file: file.into() }),
        Some(b'{' | b'[') => trace::read(file, input, rules),
        Some(_) => nsys_csv::read(file, BufReader::new(input), rules).map(|found| vec![found]),
    }
}

/// Fills `into` as far as the file goes.
fn fill(file: &mut File, into: &mut [u8]) -> std::io::Result<usize> {
    let mut length = 0;
    while length < into.len() {
        match file.read(&mut into[length..]) {
            Ok(0) => break,
            Ok(n) => length += n,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(length)
}

/// Gives every rank its number, sorts, and says what is missing.
fn number(found: Vec<Found>, file: &str, profile: &mut Profile) -> Result<(), Error> {
    let works = |f: &Found| f.rank.events.iter().any(|e| matches!(e.kind, Kind::Kernel(_) | Kind::Op | Kind::Comm | Kind::Copy(_)));
    if !found.iter().any(works) {
        return Err(Error::NoEvents { file: file.into(), why: "none of its events is a kernel, an operator, a copy or communication".into() });
    }
    let mut ranks = BTreeMap::new();
    let (known, unknown): (Vec<Found>, Vec<Found>) = found.into_iter().partition(|f| f.number.is_some());
    for Found { mut rank, number } in known {
        rank.rank = number.unwrap_or_default();
        if let Some(first) = ranks.get(&rank.rank).map(|r: &super::Rank| r.source.clone()) {
            return Err(Error::TwiceTheRank { rank: rank.rank, first, second: rank.source });
        }
        ranks.insert(rank.rank, rank);
    }
    let mut free = 0;
    for Found { mut rank, .. } in unknown {
        while ranks.contains_key(&free) {
            free += 1;
        }
        rank.rank = free;
        profile.notes.push(format!("{} does not say its rank and is taken for rank {free}", rank.source));
        ranks.insert(free, rank);
    }
    profile.ranks = ranks.into_values().collect();
    if let Some(world) = profile.ranks.iter().filter_map(|r| r.world_size).max() {
        let missing: Vec<String> = (0..world.min(4096)).filter(|r| profile.ranks.iter().all(|p| p.rank != *r)).map(|r| r.to_string()).collect();
        if !missing.is_empty() {
            let shown = if missing.len() > 8 { format!("{}, …", missing[..8].join(", ")) } else { missing.join(", ") };
            profile
                .notes
                .push(format!("{} of {world} ranks given; without {shown}, waiting for them cannot be told from transfer", profile.ranks.len()));
        }
    }
    Ok(())
}

/// `rank0`, `rank-0`, `worker3` in a file's name; the last counts.
fn rank_of_file(path: &Path) -> Option<u32> {
    let name = path.file_name()?.to_string_lossy().to_lowercase();
    let after = ["rank", "worker"].iter().filter_map(|word| name.rfind(word).map(|i| i + word.len())).max()?;
    let digits: String = name[after..].trim_start_matches(['-', '_', '=', '.']).chars().take_while(char::is_ascii_digit).collect();
    digits.parse().ok()
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_name_tells_the_rank() {
        let rank = |name: &str| rank_of_file(Path::new(name));
        for (name, number) in
            [("a/rank-12.json", 12), ("kineto_rank3.json.gz", 3), ("worker7_step_12.169.pt.trace.json", 7), ("trace_8_rank_1.json", 1)]
        {
            assert_eq!(rank(name), Some(number), "{name}");
        }
        for name in ["trace.json", "host_1234.567.pt.trace.json", "ranking.json", "rank99999999999.json"] {
            assert_eq!(rank(name), None, "{name}");
        }
        assert_eq!(trace::last_number("rank 3"), Some(3));
        assert_eq!(trace::last_number("µ7µ"), Some(7));
        assert_eq!(trace::last_number("python"), None);
    }
}
