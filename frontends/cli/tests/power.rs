//! What a power cut may leave of a folder, computed from a log of calls.
//!
//! A system promises little: bytes are on the disk after the file's `fsync`, names after the
//! folder's. Before, each name and each byte may be there or not, in any order. For every prefix of
//! the log, several such folders are made on the disk, and each must have whole checkpoints only,
//! among them the last one that was finished before the cut.

use crate::checkpoints::{latest, newest_of_whole};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

/// Folders for each prefix whose unsynced parts are drawn.
const DRAWN: u64 = 4;

/// A file or a folder.
#[derive(Clone)]
enum Node {
    File { now: Vec<u8>, synced: Vec<u8> },
    Folder { now: Names, synced: Names },
    Link(String),
}

/// Numbers of nodes by name.
type Names = BTreeMap<String, usize>;

impl Node {
    fn folder() -> Node {
        Node::Folder {
            now: Names::new(),
            synced: Names::new(),
        }
    }
}

/// A disk. Node 0 is the folder of checkpoints.
struct Disk {
    nodes: Vec<Node>,
    /// Nodes of open files, by their numbers in the log.
    open: BTreeMap<String, usize>,
}

impl Disk {
    fn names(&mut self, folder: usize) -> &mut Names {
        match &mut self.nodes[folder] {
            Node::Folder { now, .. } => now,
            Node::File { .. } | Node::Link(_) => panic!("node {folder} is no folder"),
        }
    }

    /// The folder and the last name of a path.
    fn parent<'a>(&mut self, path: &'a str) -> (usize, &'a str) {
        match path.rsplit_once('/') {
            None => (0, path),
            Some((folder, name)) => (self.find(folder), name),
        }
    }

    fn find(&mut self, path: &str) -> usize {
        if path == "." {
            return 0;
        }
        let (folder, name) = self.parent(path);
        self.names(folder)[name]
    }

    fn insert(&mut self, path: &str, node: Node) -> usize {
        let number = self.nodes.len();
        self.nodes.push(node);
        let (folder, name) = self.parent(path);
        self.names(folder).insert(name.to_string(), number);
        number
    }

    /// Runs a line of the log.
    fn run(&mut self, line: &str) {
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["mkdir", "."] => {}
            ["mkdir", path] => {
                self.insert(path, Node::folder());
            }
            ["create", number, path] => {
                let (now, synced) = (vec![], vec![]);
                let node = self.insert(path, Node::File { now, synced });
                self.open.insert(number.to_string(), node);
            }
            ["open", number, path] => {
                let node = self.find(path);
                self.open.insert(number.to_string(), node);
            }
            ["write", number, data] => {
                let node = self.open[number];
                let Node::File { now, .. } = &mut self.nodes[node] else {
                    panic!("{line:.40}: no file");
                };
                let bytes = data.as_bytes().chunks(2).map(|hex| {
                    let hex = std::str::from_utf8(hex).unwrap();
                    u8::from_str_radix(hex, 16).unwrap()
                });
                now.extend(bytes);
            }
            ["truncate", number, "0"] => {
                let node = self.open[number];
                if let Node::File { now, .. } = &mut self.nodes[node] {
                    now.clear();
                }
            }
            ["sync", number] => match &mut self.nodes[self.open[number]] {
                Node::File { now, synced } => synced.clone_from(now),
                Node::Folder { now, synced } => synced.clone_from(now),
                Node::Link(_) => panic!("a link is synced"),
            },
            ["rename", from, to] => {
                let (folder, name) = self.parent(from);
                let node = self.names(folder).remove(name).unwrap();
                let (folder, name) = self.parent(to);
                self.names(folder).insert(name.to_string(), node);
            }
            ["symlink", to, path] => {
                self.insert(path, Node::Link(to.to_string()));
            }
            ["unlink", path] => {
                let (folder, name) = self.parent(path);
                self.names(folder).remove(name).unwrap();
            }
            _ => panic!("{line:.80}: not understood"),
        }
    }

    /// Makes a folder that a power cut may leave. `keeps` says for each unsynced part whether it is
    /// on the disk.
    fn make(&self, node: usize, path: &Path, keeps: &mut dyn FnMut(Part) -> bool) {
        match &self.nodes[node] {
            Node::File { now, synced } => {
                let same = now.iter().zip(synced).take_while(|(a, b)| a == b).count();
                let unsynced = &now[same..];
                let kept = match keeps(Part::Bytes) {
                    true if keeps(Part::Bytes) => unsynced.len(),
                    true => unsynced.len() / 2,
                    false => 0,
                };
                // Either the synced bytes, or some that came later in their place.
                let bytes = match kept {
                    0 => synced.clone(),
                    kept => now[..same + kept].to_vec(),
                };
                fs::write(path, bytes).unwrap();
            }
            Node::Link(to) => symlink(to, path).unwrap(),
            Node::Folder { now, synced } => {
                fs::create_dir(path).unwrap();
                let names: std::collections::BTreeSet<&String> =
                    now.keys().chain(synced.keys()).collect();
                for name in names {
                    let (new, old) = (now.get(name), synced.get(name));
                    let kept = if new == old || keeps(Part::Name) {
                        new
                    } else {
                        old
                    };
                    if let Some(&node) = kept {
                        self.make(node, &path.join(name), keeps);
                    }
                }
            }
        }
    }
}

/// What may be on the disk or not.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    Name,
    Bytes,
}

/// Checks each folder that a power cut after each line may leave. `folder` is used for them.
pub(crate) fn check_all_prefixes(log: &str, folder: &Path) {
    let mut disk = Disk {
        nodes: vec![Node::folder()],
        open: BTreeMap::new(),
    };
    let (mut n_folders, mut finished, mut named) = (0, 0, 0);
    for (number, line) in log.lines().enumerate() {
        disk.run(line);
        // A checkpoint is finished when its folder's name is synced.
        if let Some(step) = line.strip_prefix("rename .step-").and_then(|rest| {
            let (from, to) = rest.split_once(" step-")?;
            (from == to).then(|| to.parse().unwrap())
        }) {
            named = step;
        }
        let is_root_sync = line
            .strip_prefix("sync ")
            .is_some_and(|n| disk.open[n] == 0);
        if is_root_sync {
            finished = named;
        }

        let mut seed = number as u64;
        let mut drawn = |_| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            seed >> 63 == 0
        };
        let mut check = |keeps: &mut dyn FnMut(Part) -> bool| {
            let _ = fs::remove_dir_all(folder);
            disk.make(0, folder, keeps);
            let newest = newest_of_whole(folder.to_str().unwrap());
            assert!(
                newest >= finished,
                "line {number}, {line:.60}: {newest}, {finished}"
            );
            if let Some(latest) = latest(folder) {
                assert!(
                    latest.exists(),
                    "line {number}, {line:.60}: latest names nothing"
                );
            }
            n_folders += 1;
        };
        check(&mut |_| true);
        check(&mut |_| false);
        check(&mut |part| part == Part::Name);
        check(&mut |part| part == Part::Bytes);
        (0..DRAWN).for_each(|_| check(&mut drawn));
    }
    assert!(finished == 12 && n_folders > 1000, "{finished} {n_folders}");
}
