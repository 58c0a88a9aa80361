//! The memory limits of the machine and of this process's control groups (cgroup v1 and v2).
//!
//! A process is limited by its own group and by all groups around it. systemd and Slurm set limits
//! on slices and jobs, and the processes run in nested groups without a limit. So we query all
//! ancestors that are mounted here, and the tightest limit wins.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

#[cfg(target_os = "linux")]
use crate::fork::Mutex;
use crate::fork::get_or_init;

/// Returns the number of processors that the process may use: what CPU affinity and the quotas of
/// its control groups leave.
///
/// Quotas are read once for each affinity, because reading them takes longer than building a
/// session on a small model.
pub fn processors() -> usize {
    let read = || std::thread::available_parallelism().map_or(1, usize::from);
    #[cfg(target_os = "linux")]
    {
        type Affinity = [libc::c_ulong; 16];
        static KNOWN: Mutex<Option<(Affinity, usize)>> = Mutex::new(None);
        let mut affinity: Affinity = [0; 16];
        // SAFETY: the kernel writes at most the bytes of the array.
        let got = unsafe {
            libc::sched_getaffinity(0, size_of::<Affinity>(), affinity.as_mut_ptr().cast::<libc::cpu_set_t>())
        };
        if got != 0 {
            return read();
        }
        let mut known = KNOWN.lock();
        match *known {
            Some((before, count)) if before == affinity => count,
            _ => {
                let count = read();
                *known = Some((affinity, count));
                count
            }
        }
    }
    #[cfg(not(target_os = "linux"))]
    read()
}

/// Returns the memory that this process can use at most, in bytes: the machine's, or the tightest
/// limit of a control group. `None` if the system does not report it.
pub fn host_memory_bytes() -> Option<usize> {
    static BYTES: OnceLock<Option<usize>> = OnceLock::new();
    *get_or_init(&BYTES, || {
        HostMemory::under(Path::new("/")).map(|memory| memory.total).or_else(physical_bytes)
    })
}

/// Returns the memory that is free now, in bytes: what the machine can provide without swapping, or
/// less if a control group has less left. Reclaimable page cache counts as free. `None` if the
/// system does not report it.
///
/// ```
/// let (free, all) = (ort_alloc::free_memory_bytes(), ort_alloc::host_memory_bytes());
/// assert!(free <= all);
/// ```
pub fn free_memory_bytes() -> Option<usize> {
    HostMemory::under(Path::new("/")).map(|memory| memory.free).or_else(host_memory_bytes)
}

/// Total and free memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct HostMemory {
    total: usize,
    free: usize,
}

impl HostMemory {
    /// Reads the memory from the system's files below `root`.
    fn under(root: &Path) -> Option<HostMemory> {
        let text = read(&root.join("proc/meminfo"))?;
        let kibibytes = |name: &str| Some(field(&text, name)?.saturating_mul(1024));
        let total = kibibytes("MemTotal:")?;
        // `MemAvailable` exists since Linux 3.14.
        let free = kibibytes("MemAvailable:").or_else(|| kibibytes("MemFree:"))?;
        let machine = HostMemory { total, free: free.min(total) };
        let groups = folders(root).into_iter().filter_map(|group| group.memory(total));
        Some(groups.fold(machine, |least, group| HostMemory {
            total: least.total.min(group.total),
            free: least.free.min(group.free),
        }))
    }
}

/// The file names of a cgroup version.
struct Version {
    limits: &'static [&'static str],
    used: &'static str,
    /// Lines of `memory.stat` that count page cache, which the kernel reclaims before it refuses
    /// memory.
    droppable: &'static [&'static str],
}

const V1: Version = Version {
    limits: &["memory.limit_in_bytes"],
    used: "memory.usage_in_bytes",
    droppable: &["total_inactive_file", "total_active_file"],
};

const V2: Version = Version {
    limits: &["memory.max", "memory.high"],
    used: "memory.current",
    droppable: &["inactive_file", "active_file"],
};

/// The folder of a control group.
struct Group {
    folder: PathBuf,
    version: &'static Version,
}

impl Group {
    /// Returns the group's limit and what is left of it, or `None` without a limit below the
    /// machine's memory.
    fn memory(&self, machine: usize) -> Option<HostMemory> {
        let number = |name: &str| read(&self.folder.join(name))?.trim().parse().ok();
        // Without a limit, version 2 says "max", which does not parse, and version 1 a number
        // beyond any machine.
        let total: usize = self.version.limits.iter().filter_map(|name| number(name)).min()?;
        if total >= machine {
            // Reading what is used takes the kernel longer than all else here.
            return None;
        }
        let used = number(self.version.used).unwrap_or(0);
        let stat = read(&self.folder.join("memory.stat")).unwrap_or_default();
        let droppable = self.version.droppable.iter().filter_map(|name| field(&stat, name));
        let held = droppable.fold(used, usize::saturating_sub);
        Some(HostMemory { total, free: total.saturating_sub(held) })
    }
}

/// Reads a file of the system. Its length is not known before, and asking for it in small pieces
/// takes a call for each.
fn read(path: &Path) -> Option<String> {
    let mut text = String::with_capacity(8 << 10);
    File::open(path).ok()?.read_to_string(&mut text).ok()?;
    Some(text)
}

/// Returns the number after a name at the start of a line.
fn field(text: &str, name: &str) -> Option<usize> {
    let mut lines = text.lines().map(str::split_whitespace);
    lines.find_map(|mut words| (words.next() == Some(name)).then(|| words.next()?.parse().ok())?)
}

/// Returns the control groups of this process and all their ancestors.
fn folders(root: &Path) -> Vec<Group> {
    let own = read(&root.join("proc/self/cgroup")).unwrap_or_default();
    let mounts = read(&root.join("proc/self/mountinfo")).unwrap_or_default();
    let mut groups = Vec::new();
    for line in own.lines() {
        // The format is "hierarchy:controllers:path". Version 2 has no controllers here.
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (version, kind) = match controllers {
            "" => (&V2, "cgroup2"),
            _ if controllers.split(',').any(|name| name == "memory") => (&V1, "cgroup"),
            _ => continue,
        };
        let mounted: Vec<Mount<'_>> = mounts.lines().filter_map(|line| Mount::of(line, kind)).collect();
        // Without a mount entry, fall back to the usual mount points.
        let usual = ["/sys/fs/cgroup", "/sys/fs/cgroup/memory"].map(|point| Mount { root: "/", point });
        let mounted = if mounted.is_empty() { &usual[..] } else { &mounted[..] };
        for mount in mounted {
            let top = root.join(mount.point.trim_start_matches('/'));
            let below = mount.below(path);
            let folders = below.ancestors().map(|below| top.join(below));
            groups.extend(folders.map(|folder| Group { folder, version }));
        }
    }
    groups
}

/// Where a cgroup hierarchy is mounted, and which part of it.
#[derive(Clone, Copy)]
struct Mount<'a> {
    root: &'a str,
    point: &'a str,
}

impl<'a> Mount<'a> {
    /// Parses a line of `mountinfo`, if it is a file system of this kind. In version 1, only the
    /// memory controller's hierarchy counts.
    fn of(line: &'a str, kind: &str) -> Option<Mount<'a>> {
        let (mount, system) = line.split_once(" - ")?;
        let mut system = system.split(' ');
        let found = system.next()? == kind;
        let options = system.nth(1).unwrap_or("");
        let fits = found && (kind == "cgroup2" || options.split(',').any(|name| name == "memory"));
        // proc(5): root and mount point are the fields 4 and 5.
        let mut mount = mount.split(' ').skip(3);
        let (root, point) = (mount.next()?, mount.next()?);
        fits.then_some(Mount { root, point })
    }

    /// Returns a group's path below the mount point. A path outside the mounted part counts as the
    /// mount point itself, as in a container that sees its own group as the root.
    fn below(self, path: &'a str) -> &'a Path {
        let inside = if self.root == "/" { Some(path) } else { path.strip_prefix(self.root) };
        // cgroup_namespaces(7): a group outside of the namespace is shown with `..`.
        let inside = inside.filter(|inside| !inside.split('/').any(|part| part == ".."));
        Path::new(inside.unwrap_or("").trim_start_matches('/'))
    }
}

/// Returns the machine's memory according to the C library.
fn physical_bytes() -> Option<usize> {
    #[cfg(unix)]
    {
        // SAFETY: `sysconf` only reads a system constant.
        let pages = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) };
        let bytes = usize::try_from(pages).ok()?.checked_mul(crate::region::page_bytes());
        bytes.filter(|&bytes| bytes > 0)
    }
    #[cfg(not(unix))]
    {
        None
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const MIB: usize = 1 << 20;

    /// Creates a root folder with these files.
    fn system(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a folder");
        let meminfo = ("proc/meminfo", "MemTotal: 8192000 kB\nMemFree: 10 kB\nMemAvailable: 4096000 kB\n");
        for (path, text) in std::iter::once(&meminfo).chain(files) {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("a parent")).expect("folders");
            fs::write(path, text).expect("a file");
        }
        root
    }

    #[test]
    fn the_tightest_of_all_groups_around_a_process_counts() {
        let machine = HostMemory { total: 8_192_000 * 1024, free: 4_096_000 * 1024 };
        let memory = |total, free| HostMemory { total: total * MIB, free: free * MIB };
        let slice = "sys/fs/cgroup/user.slice";
        let v2 = "36 30 0:27 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n";
        let v1 = "36 30 0:27 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n\
                  37 30 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n";
        let of = |folder: &str, name: &str| format!("{folder}/{name}");
        let (own, high, current) =
            (of(slice, "job.scope/memory.max"), of(slice, "memory.high"), of(slice, "memory.current"));
        let (parent, stat) = (of(slice, "memory.max"), of(slice, "memory.stat"));
        let slurm = "sys/fs/cgroup/memory/slurm/job_7";
        let (job, usage, total) = (
            of(slurm, "memory.limit_in_bytes"),
            of(slurm, "memory.usage_in_bytes"),
            of(slurm, "memory.stat"),
        );
        let mib = |count: usize| (count * MIB).to_string();
        let stats = format!("anon 5\ninactive_file {}\nactive_file {}\n", 30 * MIB, 20 * MIB);
        let stats_v1 = format!("inactive_file 7\ntotal_inactive_file {}\n", 30 * MIB);
        let cases: &[(&str, &[(&str, &str)], HostMemory)] = &[
            ("no groups", &[], machine),
            (
                "the limit of the parent, which has other processes",
                &[
                    ("proc/self/cgroup", "0::/user.slice/job.scope\n"),
                    ("proc/self/mountinfo", v2),
                    (&own, "max\n"),
                    (&parent, &mib(500)),
                    (&current, &mib(400)),
                    (&stat, &stats),
                ],
                memory(500, 150),
            ),
            (
                "a throttle below the limit, and a tighter group inside",
                &[
                    ("proc/self/cgroup", "0::/user.slice/job.scope\n"),
                    (&own, &mib(300)),
                    (&parent, &mib(500)),
                    (&high, &mib(200)),
                    (&current, &mib(100)),
                ],
                memory(200, 100),
            ),
            (
                "version 1, nested as Slurm does it",
                &[
                    ("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/slurm/job_7/step_0\n0::/\n"),
                    ("proc/self/mountinfo", v1),
                    ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
                    (&job, &mib(256)),
                    (&usage, &mib(200)),
                    (&total, &stats_v1),
                ],
                memory(256, 86),
            ),
            (
                "a container that sees its own group as the top",
                &[
                    ("proc/self/cgroup", "0::/../../docker/abc\n"),
                    ("sys/fs/cgroup/memory.max", &mib(64)),
                    ("sys/fs/cgroup/memory.current", &mib(100)),
                ],
                memory(64, 0),
            ),
            (
                "a part of the hierarchy that is mounted elsewhere",
                &[
                    ("proc/self/cgroup", "0::/pod/one/two\n"),
                    ("proc/self/mountinfo", "1 2 0:3 /pod /groups rw - cgroup2 none rw\n"),
                    ("groups/one/memory.max", &mib(32)),
                    ("sys/fs/cgroup/memory.max", "1\n"),
                ],
                memory(32, 32),
            ),
        ];
        for (what, files, expected) in cases {
            let root = system(files);
            assert_eq!(HostMemory::under(root.path()), Some(*expected), "{what}");
        }
        assert_eq!(HostMemory::under(Path::new("/nowhere")), None);
    }
}
