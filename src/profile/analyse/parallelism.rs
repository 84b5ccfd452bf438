//! How a run is parallel, as its profile shows it.
//!
//! Strongest first: ranges say it (`PP:…`, `FSDP::…`, `DistributedDataParallel.forward`); names of groups say it (`mesh_tp`); otherwise the pattern does:
//! messages along a chain are a pipeline, gathers with reduce-scatters are sharded state, all-reduces only in backward are gradients of data
//! parallelism, all-reduces of one size in forward and backward alike are activations of tensor parallelism, an all-to-all moves rows between
//! shards of embeddings or experts. Every statement carries its evidence.

use std::collections::{BTreeMap, BTreeSet};

use super::matching::Instance;
use super::schedule::{self, Schedule};
use super::steps::Steps;
use crate::profile::{Comm, CommOp, Profile};

#[derive(Clone, PartialEq, Debug)]
pub struct Parallelism {
    pub kind: ParallelKind,
    /// Ranks in one group.
    pub degree: u32,
    pub evidence: Vec<String>,
}

#[derive(Clone, PartialEq, Debug)]
pub enum ParallelKind {
    /// Every rank holds the model; gradients are all-reduced.
    Data {
        buckets_per_step: Option<usize>,
        gradient_elements: Option<u64>,
    },
    /// Parameters, gradients and optimizer state are split (FSDP, ZeRO): 3 if parameters are gathered again in backward, else 2.
    Sharded {
        zero: u8,
        modules: usize,
    },
    Tensor {
        calls_per_step: Option<usize>,
    },
    Pipeline(Schedule),
    /// Embeddings or experts are split, rows travel.
    AllToAll {
        calls_per_step: Option<usize>,
    },
    /// A group that the program made and that nothing in the profile uses.
    Unused {
        name: String,
    },
    /// One rank alone, or no communication.
    None,
}

impl ParallelKind {
    pub fn name(&self) -> &'static str {
        match self {
            ParallelKind::Data { .. } => "data",
            ParallelKind::Sharded { .. } => "sharded",
            ParallelKind::Tensor { .. } => "tensor",
            ParallelKind::Pipeline(_) => "pipeline",
            ParallelKind::AllToAll { .. } => "all_to_all",
            ParallelKind::Unused { .. } => "unused",
            ParallelKind::None => "none",
        }
    }
}

pub fn recognise(profile: &Profile, steps: &[Steps], instances: &[Instance]) -> Vec<Parallelism> {
    let run = Run { profile, instances, steps: steps.iter().map(Steps::len).max().unwrap_or(0) };
    let mut found = Vec::new();
    found.extend(run.pipeline());
    let sharded = run.sharded();
    let is_sharded = sharded.is_some();
    found.extend(sharded);
    let tensor = run.tensor(is_sharded);
    let (tensor, tensor_groups) = tensor.unzip();
    found.extend(tensor);
    if !is_sharded {
        found.extend(run.data(&tensor_groups.unwrap_or_default()));
    }
    found.extend(run.all_to_all());
    found.extend(run.unused());
    if found.iter().all(|p| matches!(p.kind, ParallelKind::Unused { .. })) {
        let evidence = vec!["no communication was recorded".to_string()];
        found.insert(0, Parallelism { kind: ParallelKind::None, degree: 1, evidence });
    }
    found
}

/// Members of groups; `None` stands for the unknown.
type Groups = BTreeSet<Option<Vec<u32>>>;

struct Run<'p> {
    profile: &'p Profile,
    instances: &'p [Instance],
    /// Steps recorded; 0 if they are not marked.
    steps: usize,
}

impl Run<'_> {
    /// Calls in one step, by one member.
    fn per_step(&self, calls: usize) -> Option<usize> {
        (self.steps > 0 && calls.is_multiple_of(self.steps)).then(|| calls / self.steps)
    }

    fn of_op(&self, op: CommOp) -> impl Iterator<Item = &Instance> {
        self.instances.iter().filter(move |i| i.op == op)
    }

    fn comms<'a>(&'a self, instance: &'a Instance) -> impl Iterator<Item = &'a Comm> {
        instance.members.iter().map(|m| m.of(self.profile))
    }

    /// The largest group among instances, and how many of them the busiest rank took part in.
    fn degree<'a>(&self, instances: impl Iterator<Item = &'a Instance>) -> (u32, usize) {
        let mut calls: BTreeMap<usize, usize> = BTreeMap::new();
        let mut degree = 1;
        for instance in instances {
            degree = degree.max(instance.group_size.unwrap_or(0)).max(instance.members.len() as u32);
            for member in &instance.members {
                *calls.entry(member.rank).or_default() += 1;
            }
        }
        (degree, calls.values().copied().max().unwrap_or(0))
    }

    fn ranges_with(&self, test: impl Fn(&str) -> bool) -> (usize, BTreeSet<&str>) {
        let mut names = BTreeSet::new();
        let mut count = 0;
        for rank in &self.profile.ranks {
            for (_, name) in rank.ranges().filter(|(_, name)| test(name)) {
                count += 1;
                names.insert(name);
            }
        }
        (count, names)
    }

    fn pipeline(&self) -> Option<Parallelism> {
        let schedule = schedule::by_ranges(self.profile).or_else(|| schedule::by_messages(self.profile))?;
        let evidence = schedule.evidence.clone();
        Some(Parallelism { degree: schedule.ranks, kind: ParallelKind::Pipeline(schedule), evidence })
    }

    fn sharded(&self) -> Option<Parallelism> {
        let gathers: Vec<&Instance> = self.of_op(CommOp::AllGather).collect();
        let scatters: Vec<&Instance> = self.of_op(CommOp::ReduceScatter).collect();
        let (ranges, _) = self.ranges_with(|n| n.starts_with("FSDP::") || n.starts_with("FullyShardedDataParallel"));
        if ranges == 0 && (gathers.is_empty() || scatters.is_empty()) {
            return None;
        }
        let (_, names) = self.ranges_with(|n| n.starts_with("FSDP::all_gather") && !n.starts_with("FSDP::all_gather_copy_out"));
        let modules = names.len();
        let (degree, gathered) = self.degree(gathers.iter().copied());
        let (_, reduced) = self.degree(scatters.iter().copied());
        let mut evidence = Vec::new();
        if ranges > 0 {
            evidence.push(format!("{ranges} `FSDP::` ranges over {modules} modules"));
        }
        if gathered + reduced > 0 {
            evidence.push(format!("{gathered} all-gathers and {reduced} reduce-scatters a rank"));
        }
        // The root is kept after forward, so it is gathered once; every other module twice.
        let backward = gathers.iter().flat_map(|i| self.comms(i)).filter(|c| c.backward == Some(true)).count();
        let again = reduced > 0 && gathered > reduced || backward > 0;
        evidence.push(if again { "parameters are gathered again in backward: ZeRO-3".into() } else { "parameters are gathered once: ZeRO-2".into() });
        Some(Parallelism { kind: ParallelKind::Sharded { zero: if again { 3 } else { 2 }, modules }, degree: degree.max(1), evidence })
    }

    /// With the groups it is over.
    fn tensor(&self, is_sharded: bool) -> Option<(Parallelism, Groups)> {
        let named = |name: &str| name.split(['_', '-', ' ', '.']).any(|w| matches!(w.to_ascii_lowercase().as_str(), "tp" | "tensor" | "mp"));
        let group_named = |group: &Option<Vec<u32>>| {
            let group = group.as_ref()?;
            self.profile.ranks.iter().flat_map(|r| &r.groups).find(|g| g.ranks == *group && (named(&g.description) || named(&g.name)))
        };
        let moves = |i: &&Instance| matches!(i.op, CommOp::AllReduce | CommOp::AllGather | CommOp::ReduceScatter);
        let by_name: Vec<&Instance> = self.instances.iter().filter(moves).filter(|i| group_named(&i.group).is_some()).collect();
        if let Some(group) = by_name.first().and_then(|i| group_named(&i.group)) {
            let (degree, calls) = self.degree(by_name.iter().copied());
            let evidence = vec![format!("{calls} collectives a rank over the group `{}` of {degree}", group.description)];
            return Some((
                Parallelism { kind: ParallelKind::Tensor { calls_per_step: self.per_step(calls) }, degree, evidence },
                by_name.iter().map(|i| i.group.clone()).collect(),
            ));
        }
        // Activations: one size, as often in forward as in backward, at least four times a step.
        let mut sizes: BTreeMap<(u64, Option<u32>), Vec<&Instance>> = BTreeMap::new();
        for instance in self.of_op(CommOp::AllReduce).filter(|_| !is_sharded) {
            if let Some(bytes) = instance.bytes {
                sizes.entry((bytes, instance.group_size)).or_default().push(instance);
            }
        }
        let ((bytes, _), calls) = sizes.into_iter().max_by_key(|(_, calls)| calls.len())?;
        let phase = |wanted: bool| calls.iter().filter(|i| self.comms(i).any(|c| c.backward == Some(wanted))).count();
        let (forward, backward) = (phase(false), phase(true));
        if forward < 4 || backward < 4 || forward.abs_diff(backward) * 2 > forward.max(backward) {
            return None;
        }
        let (degree, of_one) = self.degree(calls.iter().copied());
        let evidence = vec![format!("{of_one} all-reduces a rank, all of {bytes} bytes, in forward and backward alike: activations, not gradients")];
        let groups = calls.iter().map(|i| i.group.clone()).collect();
        Some((Parallelism { kind: ParallelKind::Tensor { calls_per_step: self.per_step(of_one) }, degree, evidence }, groups))
    }

    fn data(&self, tensor_groups: &Groups) -> Option<Parallelism> {
        let reduces: Vec<&Instance> = self.of_op(CommOp::AllReduce).filter(|i| !tensor_groups.contains(&i.group)).collect();
        let (ranges, _) = self.ranges_with(|n| n.starts_with("DistributedDataParallel.forward"));
        let in_backward: Vec<&Instance> = reduces.iter().copied().filter(|i| self.comms(i).any(|c| c.backward == Some(true))).collect();
        if reduces.is_empty() || ranges == 0 && in_backward.len() * 2 < reduces.len() {
            return None;
        }
        let gradients = if in_backward.is_empty() { &reduces } else { &in_backward };
        let (degree, calls) = self.degree(gradients.iter().copied());
        // Elements, by one member.
        let mut elements: BTreeMap<usize, Option<u64>> = BTreeMap::new();
        for member in gradients.iter().flat_map(|i| &i.members) {
            let sum = elements.entry(member.rank).or_insert(Some(0));
            *sum = sum.zip(member.of(self.profile).elements).and_then(|(a, b)| a.checked_add(b));
        }
        let total = elements.values().next().copied().flatten();
        let steps = self.steps.max(1) as u64;
        let gradient_elements = total.filter(|t| t % steps == 0).map(|t| t / steps);
        let buckets_per_step = self.per_step(calls).or(if self.steps == 0 { Some(calls) } else { None });
        let mut evidence = Vec::new();
        if ranges > 0 {
            evidence.push(format!("{ranges} `DistributedDataParallel.forward` ranges"));
        }
        match (buckets_per_step, gradient_elements) {
            (Some(buckets), Some(n)) => evidence.push(format!("{buckets} all-reduces a step, {n} gradient elements in all")),
            (Some(buckets), None) => evidence.push(format!("{buckets} all-reduces a step; their sizes are not recorded")),
            (None, _) => evidence.push(format!("{calls} all-reduces a rank")),
        }
        if !in_backward.is_empty() {
            evidence.push(format!("{} of {} all-reduces are issued by backward", in_backward.len(), reduces.len()));
        }
        Some(Parallelism { kind: ParallelKind::Data { buckets_per_step, gradient_elements }, degree, evidence })
    }

    fn all_to_all(&self) -> Option<Parallelism> {
        let (degree, calls) = self.degree(self.of_op(CommOp::AllToAll));
        (calls > 0).then(|| {
            let evidence = vec![format!("{calls} all-to-alls a rank: rows travel between shards of embeddings or experts")];
            Parallelism { kind: ParallelKind::AllToAll { calls_per_step: self.per_step(calls) }, degree, evidence }
        })
    }

    /// Groups made for a purpose, and used for none.
    fn unused(&self) -> Vec<Parallelism> {
        let used: BTreeSet<&Vec<u32>> = self.instances.iter().filter_map(|i| i.group.as_ref()).collect();
        // A collective whose group cannot be told may be of any.
        if self.instances.iter().any(|i| i.group.is_none()) {
            return Vec::new();
        }
        let mut names: BTreeMap<&str, u32> = BTreeMap::new();
        for group in self.profile.ranks.iter().flat_map(|r| &r.groups) {
            let same_name = || self.profile.ranks.iter().flat_map(|r| &r.groups).filter(|g| g.description == group.description);
            if group.ranks.len() > 1
                && group.description != "default_pg"
                && !group.description.is_empty()
                && same_name().all(|g| !used.contains(&g.ranks))
            {
                names.insert(&group.description, group.ranks.len() as u32);
            }
        }
        names
            .into_iter()
            .map(|(name, degree)| Parallelism {
                kind: ParallelKind::Unused { name: name.into() },
                degree,
                evidence: vec![format!("the group `{name}` exists and no recorded collective is over it")],
            })
            .collect()
    }
}
