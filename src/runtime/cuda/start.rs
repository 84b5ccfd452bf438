//! How the processes of a job find each other: who is which rank, and one message from rank 0 to all.
//!
//! `torchrun`, Slurm and `mpirun` (Open MPI's, and those of MPICH and Intel) say in the environment which rank a process is, Slurm also which machine the first one is on. Rank 0 listens; each other rank connects and says its rank and the hash of its plan; when all
//! have come with the same hash, each gets the message (NCCL's id), else each gets what is wrong. So different plans end a job in seconds, before anything hangs.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// Which rank of how many this process is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Process {
    pub rank: u64,
    pub ranks: u64,
    /// Which GPU of this machine is its own.
    pub local: u64,
    /// Where rank 0 listens.
    pub address: String,
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("{variable}: expected a number, found `{found}`")]
    Number { variable: &'static str, found: String },
    #[error("{ranks} processes were started and the plan has {expected} ranks")]
    Count { ranks: u64, expected: u64 },
    #[error(
        "the plan has {0} ranks: start as many processes, with torchrun, srun or mpirun (which set RANK and WORLD_SIZE, SLURM_PROCID, OMPI_COMM_WORLD_RANK or PMI_RANK); --together tries them all on one GPU"
    )]
    Alone(u64),
    #[error("MASTER_ADDR is not set: ranks on several machines need the address of rank 0")]
    Address,
    #[error("{address}: {why}")]
    Connect { address: String, why: String },
    #[error(
        "rank {rank} has another plan than rank 0, or another dplan, NVRTC, cuBLASLt or table of products (hash {found:016x}, not {expected:016x})"
    )]
    Plan { rank: u64, found: u64, expected: u64 },
    #[error("rank 0 says: {0}")]
    Refused(String),
    #[error("after {seconds} s, these ranks had not come: {missing}")]
    Missing { seconds: u64, missing: String },
}

/// Names of rank, number of ranks, number on this machine, and ranks on this machine, by launcher.
const LAUNCHERS: [[&str; 4]; 4] = [
    ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"],
    ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"],
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"],
    ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
];

/// Where Slurm lists a job's machines.
const SLURM_NODES: [&str; 2] = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"];

/// The first machine of a list as Slurm writes it: `gpu[03-07,12],login1`.
fn first_node(list: &str) -> Option<String> {
    let end = list.find(['[', ',']).unwrap_or(list.len());
    let (name, rest) = list.split_at(end);
    let Some(inside) = rest.strip_prefix('[') else { return Some(name.to_string()) };
    let (numbers, behind) = inside.split_once(']')?;
    let number = numbers.split(['-', ',']).next()?;
    Some(format!("{name}{number}{}", behind.split(',').next().unwrap_or_default()))
}

/// Beside torchrun's own store, which has `MASTER_PORT`.
const PORT_AFTER: u16 = 1;
const DEFAULT_PORT: u16 = 29_500;

impl Process {
    /// From the environment; alone if no launcher started this process.
    ///
    /// # Errors
    /// What the launcher said that cannot be, or does not fit a plan of `expected` ranks.
    pub fn find(variable: impl Fn(&str) -> Option<String>, expected: u64) -> Result<Process, StartError> {
        let number = |name: &'static str| -> Result<Option<u64>, StartError> {
            variable(name).map(|v| v.trim().parse().map_err(|_| StartError::Number { variable: name, found: v.clone() })).transpose()
        };
        for [rank_name, ranks, local, together] in LAUNCHERS {
            let (Some(rank), Some(ranks)) = (number(rank_name)?, number(ranks)?) else { continue };
            if ranks != expected {
                return Err(StartError::Count { ranks, expected });
            }
            let (local, together) = (number(local)?.unwrap_or(rank), number(together)?);
            let port = number("MASTER_PORT")?.and_then(|p| u16::try_from(p).ok()).unwrap_or(DEFAULT_PORT).saturating_add(PORT_AFTER);
            let slurm =
                || SLURM_NODES.iter().find_map(|name| variable(name)).filter(|_| rank_name.starts_with("SLURM")).and_then(|list| first_node(&list));
            let host = match variable("MASTER_ADDR").or_else(slurm) {
                Some(host) => host,
                None if ranks == 1 || together == Some(ranks) => "127.0.0.1".into(),
                None => return Err(StartError::Address),
            };
            return Ok(Process { rank, ranks, local, address: format!("{host}:{port}") });
        }
        if expected == 1 { Ok(Process { rank: 0, ranks: 1, local: 0, address: String::new() }) } else { Err(StartError::Alone(expected)) }
    }

    /// Gives every rank the `message` of rank 0 (that of others is not looked at), once all have come with the same plan.
    ///
    /// # Errors
    /// If somebody does not come, or has another plan.
    pub fn share<const N: usize>(&self, plan: u64, timeout: Duration, message: [u8; N]) -> Result<[u8; N], StartError> {
        if self.rank == 0 { self.give(plan, timeout, message) } else { self.take(plan, timeout) }
    }

    /// Where rank 0 listens: on all of its addresses, since its own name may mean another to itself (often a loopback address) than to others; on a loopback address alone if
    /// that is what all are told.
    fn listens(&self) -> std::io::Result<Vec<SocketAddr>> {
        let (host, port) = self.address.rsplit_once(':').unwrap_or((&self.address, ""));
        let loopback = host == "localhost" || host.trim_matches(['[', ']']).parse().is_ok_and(|ip: IpAddr| ip.is_loopback());
        match port.parse::<u16>() {
            Ok(port) if !loopback => Ok(vec![(Ipv6Addr::UNSPECIFIED, port).into(), (Ipv4Addr::UNSPECIFIED, port).into()]),
            _ => Ok(self.address.to_socket_addrs()?.collect()),
        }
    }

    fn give<const N: usize>(&self, plan: u64, timeout: Duration, message: [u8; N]) -> Result<[u8; N], StartError> {
        let failed = |e: std::io::Error| StartError::Connect { address: self.address.clone(), why: e.to_string() };
        if self.ranks == 1 {
            return Ok(message);
        }
        let listener = TcpListener::bind(&self.listens().map_err(failed)?[..]).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let begin = Instant::now();
        let mut come: Vec<Option<TcpStream>> = (0..self.ranks).map(|_| None).collect();
        let mut wrong = None;
        while come.iter().skip(1).any(Option::is_none) {
            if begin.elapsed() > timeout {
                let missing: Vec<String> = come.iter().enumerate().skip(1).filter(|(_, c)| c.is_none()).map(|(r, _)| r.to_string()).collect();
                wrong.get_or_insert(StartError::Missing { seconds: timeout.as_secs(), missing: missing.join(", ") });
                break;
            }
            let Ok((mut peer, _)) = listener.accept() else {
                std::thread::sleep(Duration::from_millis(5));
                continue;
            };
            let mut said = [0; 16];
            // Whoever says something else, or nothing, is no rank of this job.
            let heard = peer
                .set_nonblocking(false)
                .and_then(|()| peer.set_read_timeout(Some(Duration::from_secs(5))))
                .and_then(|()| peer.read_exact(&mut said));
            let [rank, found] = [&said[..8], &said[8..]].map(|b| u64::from_le_bytes(b.try_into().unwrap_or_default()));
            if heard.is_err() || rank == 0 || rank >= self.ranks {
                continue;
            }
            if found != plan {
                wrong.get_or_insert(StartError::Plan { rank, found, expected: plan });
            }
            come[rank as usize] = Some(peer);
        }
        let answer = match &wrong {
            None => [&[1][..], &message].concat(),
            Some(why) => [&[0][..], why.to_string().as_bytes()].concat(),
        };
        for peer in come.iter_mut().flatten() {
            // A rank that is gone by now will be missed by NCCL.
            let _ = peer.write_all(&answer);
        }
        wrong.map_or(Ok(message), Err)
    }

    fn take<const N: usize>(&self, plan: u64, timeout: Duration) -> Result<[u8; N], StartError> {
        let failed = |why: String| StartError::Connect { address: self.address.clone(), why };
        let begin = Instant::now();
        let mut peer = loop {
            let address = self.address.to_socket_addrs().ok().and_then(|mut a| a.next());
            match address.map(|a| TcpStream::connect_timeout(&a, Duration::from_secs(1))) {
                Some(Ok(peer)) => break peer,
                _ if begin.elapsed() > timeout => return Err(failed(format!("rank 0 did not answer within {} s", timeout.as_secs()))),
                _ => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        let said = [self.rank.to_le_bytes(), plan.to_le_bytes()].concat();
        let mut answer = Vec::new();
        let talk = peer.set_read_timeout(Some(timeout)).and_then(|()| peer.write_all(&said)).and_then(|()| peer.read_to_end(&mut answer));
        talk.map_err(|e| failed(e.to_string()))?;
        match answer.split_first() {
            Some((1, message)) => message.try_into().map_err(|_| failed(format!("{} bytes, not {N}", message.len()))),
            Some((_, why)) => Err(StartError::Refused(String::from_utf8_lossy(why).into_owned())),
            None => Err(failed("rank 0 ended".into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(variables: &[(&str, &str)], expected: u64) -> Result<Process, StartError> {
        Process::find(|name| variables.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_string()), expected)
    }

    #[test]
    fn launchers_are_understood() {
        let torchrun = [("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1"), ("MASTER_ADDR", "node0"), ("MASTER_PORT", "1234")];
        assert_eq!(find(&torchrun, 8).unwrap(), Process { rank: 5, ranks: 8, local: 1, address: "node0:1235".into() });
        let mpirun =
            [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_LOCAL_RANK", "1"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "2")];
        assert_eq!(find(&mpirun, 2).unwrap().address, "127.0.0.1:29501");
        assert!(matches!(find(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2")], 2), Err(StartError::Address)));
        for (list, first) in [("gpu[03-07,12],login1", "gpu03"), ("a,b", "a"), ("node7", "node7"), ("r[2,4]n1,x", "r2n1"), ("dgx-[1-2]", "dgx-1")] {
            let slurm = [("SLURM_PROCID", "1"), ("SLURM_NTASKS", "16"), ("SLURM_LOCALID", "1"), ("SLURM_JOB_NODELIST", list)];
            assert_eq!(find(&slurm, 16).unwrap(), Process { rank: 1, ranks: 16, local: 1, address: format!("{first}:29501") });
        }
        let hydra = [("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "2")];
        assert_eq!(find(&hydra, 2).unwrap(), Process { rank: 1, ranks: 2, local: 1, address: "127.0.0.1:29501".into() });
        assert!(matches!(find(&torchrun, 4), Err(StartError::Count { ranks: 8, expected: 4 })));
        assert!(matches!(find(&[("RANK", "x"), ("WORLD_SIZE", "2")], 2), Err(StartError::Number { variable: "RANK", .. })));
        assert!(matches!(find(&[], 2), Err(StartError::Alone(2))));
        assert_eq!(find(&[], 1).unwrap().ranks, 1);
    }

    /// A machine's own name often means a loopback address to itself, where nobody else reaches it.
    #[test]
    fn rank_0_listens_where_others_reach_it() {
        let listens = |address: &str| Process { rank: 0, ranks: 2, local: 0, address: address.into() }.listens().unwrap();
        let all = ["[::]:29501", "0.0.0.0:29501"].map(|a| a.parse::<SocketAddr>().unwrap());
        for host in ["node0", "10.0.0.7"] {
            assert_eq!(listens(&format!("{host}:29501")), all);
        }
        for host in ["127.0.0.1", "127.0.1.1", "localhost", "[::1]"] {
            assert!(listens(&format!("{host}:29501")).iter().all(|a| a.ip().is_loopback()), "{host}");
        }
    }

    /// What each of three ranks with these plans gets.
    fn share(plans: [u64; 3]) -> Vec<Result<[u8; 4], StartError>> {
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let process = |rank: u64| Process { rank, ranks: 3, local: rank, address: free.clone() };
        std::thread::scope(|scope| {
            let one = |(rank, plan): (u64, u64)| {
                let process = process(rank);
                scope.spawn(move || process.share(plan, Duration::from_secs(10), *b"here"))
            };
            let threads: Vec<_> = (0..3).zip(plans).map(one).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }

    #[test]
    fn all_ranks_of_one_plan_get_the_message() {
        assert!(share([7, 7, 7]).iter().all(|r| matches!(r, Ok(m) if m == b"here")));
    }

    #[test]
    fn another_plan_is_named() {
        let results = share([7, 7, 8]);
        assert!(matches!(results[0], Err(StartError::Plan { rank: 2, found: 8, expected: 7 })), "{:?}", results[0]);
        assert!(matches!(&results[2], Err(StartError::Refused(why)) if why.contains("rank 2 has another plan")), "{:?}", results[2]);
    }
}
