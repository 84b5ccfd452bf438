//! Each instruction alone: the shardings of operands and results fit one factor assignment, or one reshard step, of the values they claim.
//!
//! For a node with factor rule `ins → outs`, the operands' shardings determine an assignment letter → axes (each axis to one letter); the results must then be
//! sharded and partial exactly as [`crate::rule::Rule::place`] says. A result that is accumulated claims its sharding through its buffer: a member's gradient
//! has the member's sharding and is partial over the bucket's axes.

use super::ring::in_turn;
use super::structure::local;
use super::{Class, Place, Report};
use crate::cost::workspace_bytes;
use crate::dtype::DType;
use crate::entity::{BucketId, BufferId, NodeId, ValueId};
use crate::graph::{Graph, Layout, Node};
use crate::mesh::AxisSet;
use crate::optimizer::Optimizer;
use crate::program::{Buffer, Content, Instr, Pattern, Program, Role, Scalar, StageProgram, Write};
use crate::reshard::Step;
use crate::rule::{Assignment, Linear, Split, rule};
use crate::sharding::{Monoid, Sharding};

pub(super) fn check(graph: &Graph, program: &Program, report: &mut Report) {
    for (index, stage) in program.stages.iter().enumerate() {
        let types = Types { graph, program, stage };
        for (segment, body) in stage.segments.iter().map(|(id, s)| (id, &s.body)) {
            for (at, issue) in body.iter().enumerate() {
                if let Err(Fault { buffer, message }) = types.instr(&issue.instr) {
                    let place = Place { buffer, ..Place::stage(index).instr(segment, at) };
                    report.push(Class::Type, place, message);
                }
            }
        }
    }
}

/// What is wrong with an instruction, and with which of its buffers.
pub(super) struct Fault {
    buffer: Option<BufferId>,
    message: String,
}

pub(super) fn fault<T>(buffer: impl Into<Option<BufferId>>, message: impl Into<String>) -> Result<T, Fault> {
    Err(Fault { buffer: buffer.into(), message: message.into() })
}

pub(super) struct Types<'a> {
    pub graph: &'a Graph,
    pub program: &'a Program,
    pub stage: &'a StageProgram,
}

impl Types<'_> {
    fn instr(&self, instr: &Instr) -> Result<(), Fault> {
        match instr {
            Instr::Run { node, ins, outs, scratch, write } => self.run(*node, ins, outs, *scratch, *write),
            Instr::Input { dst } => match self.content(*dst) {
                Content::Value { sharding, .. } if sharding.partial.is_empty() && sharding.ring.is_none() => Ok(()),
                _ => fault(*dst, "an input is loaded whole, not partial"),
            },
            &Instr::Slice { src, dst, axes, dim } => self.step(src, dst, Step::Slice { axes, dim }),
            Instr::Collective { pattern: Pattern::AllToAll, axes, stages, dim, src, dst, .. } => {
                if !stages.is_empty() || *dim != 0 {
                    return fault(*src, "gradients on the wire are exchanged on one stage, along their one dim");
                }
                match (self.content(*src), self.content(*dst)) {
                    (
                        Content::Wire { bucket, from: AxisSet::EMPTY, kept: None }
                        | Content::Flat { bucket, role: Role::Grad, pieces: AxisSet::EMPTY },
                        Content::Wire { bucket: b, from, kept: None },
                    ) if (bucket, axes) == (b, from) && self.buffer(*src).dtype == self.buffer(*dst).dtype => Ok(()),
                    _ => fault(*dst, "expected this rank's gradients, and of the same bucket and type the shares of the members"),
                }
            }
            Instr::Collective { pattern: Pattern::Shift, axes, stages, dim, src, dst, .. } => {
                if !stages.is_empty() || *dim != 0 {
                    return fault(*src, "blocks go round on one stage, whole");
                }
                self.shift(*axes, *src, *dst)
            }
            Instr::Join { monoid, left, right, dst } => self.join(*monoid, left, right, dst),
            Instr::Collective { pattern, axes, stages, dim, monoid, src, dst } => {
                let step = match pattern {
                    Pattern::AllReduce => Step::AllReduce { axes: *axes, monoid: *monoid },
                    Pattern::ReduceScatter => Step::ReduceScatter { axes: *axes, dim: *dim, monoid: *monoid },
                    Pattern::AllGather | Pattern::AllToAll | Pattern::Shift => Step::AllGather { axes: *axes, dim: *dim },
                };
                if !stages.is_empty() && (*pattern != Pattern::AllReduce || matches!(self.content(*src), Content::Value { .. })) {
                    return fault(*src, "across stages only gradients and scalars are reduced");
                }
                match self.content(*src) {
                    Content::Value { .. } => self.step(*src, *dst, step),
                    Content::Member { role: Role::Param, .. } if *pattern == Pattern::AllGather => self.step(*src, *dst, step),
                    Content::Trust { .. } if !stages.is_empty() => {
                        fault(*src, "every home of a tied parameter has its whole sums: other stages have nothing to add")
                    }
                    Content::Wire { kept: Some(_), .. } => self.gather_pairs(step, stages, *src, *dst),
                    Content::Wire { kept: None, .. } => fault(*src, "gradients on the wire are exchanged by `all_to_all`"),
                    Content::Flat { .. } | Content::Member { .. } | Content::Scalar(_) | Content::Trust { .. } => {
                        self.flat_step(*src, *dst, step, *pattern)
                    }
                    Content::Frame => fault(*src, "a frame is copied only"),
                    Content::Scratch => fault(*src, "scratch is read"),
                }
            }
            &Instr::Send { src: buffer, .. } | &Instr::Recv { dst: buffer, .. } => match self.content(buffer) {
                Content::Value { .. } => Ok(()),
                _ => fault(buffer, "messages between stages carry graph values"),
            },
            &Instr::Zero { dst } => match self.content(dst) {
                Content::Flat { role: Role::Grad, .. } | Content::Member { role: Role::Grad, .. } | Content::Scalar(_) => Ok(()),
                _ => fault(dst, "only what accumulates (gradients, scalars) is cleared"),
            },
            &Instr::Copy { src, dst } => match (self.content(src), self.content(dst)) {
                // Each exchange begins with what the last left over, and no other.
                (Content::Flat { role: Role::Residual, .. }, _) => fault(dst, "a residual is not copied"),
                (Content::Flat { .. }, Content::Flat { .. }) if self.content(src) == self.content(dst) => Ok(()),
                (Content::Frame, Content::Frame) if self.buffer(src).bytes == self.buffer(dst).bytes => Ok(()),
                _ => fault(dst, "a copy is of a flat buffer, to one of the same, or of a frame, to one of as many bytes"),
            },
            &Instr::AddInto { src, dst } => self.add_into(src, dst),
            &Instr::Cast { src, dst } => match (self.content(src), self.content(dst)) {
                (
                    Content::Flat { bucket, role: Role::Grad, pieces: AxisSet::EMPTY },
                    Content::Wire { bucket: b, from: AxisSet::EMPTY, kept: None },
                ) if bucket == b && self.buffer(dst).dtype == DType::Bf16 => Ok(()),
                _ => fault(dst, "expected all gradients of a bucket, and their place on the wire, in bf16"),
            },
            &Instr::Compress { src, residual, dst } => match (self.content(src), self.content(residual), self.content(dst)) {
                (
                    Content::Flat { bucket, role: Role::Grad, pieces: AxisSet::EMPTY },
                    Content::Flat { bucket: a, role: Role::Residual, pieces: AxisSet::EMPTY },
                    Content::Wire { bucket: b, from: AxisSet::EMPTY, kept: Some(_) },
                ) if (a, b) == (bucket, bucket) => {
                    if self.stage.home(*bucket, Role::Residual) != Some(residual) {
                        return fault(residual, "expected the residual that the bucket keeps from step to step");
                    }
                    // What is largest is one choice for all members: of one that is cut up further, ranks that hold the same of the others would choose differently.
                    let split = |member: &crate::program::Member| self.real(member.sharding.used());
                    let members = &self.stage.buckets[*bucket].members;
                    match members.iter().find(|member| split(member) != split(&members[0])) {
                        None => Ok(()),
                        Some(odd) => {
                            fault(src, format!("{} is cut up otherwise than the bucket's first member, so ranks would choose differently", odd.param))
                        }
                    }
                }
                _ => fault(dst, "expected all gradients of a bucket, its residual, and a place for some of them on the wire"),
            },
            &Instr::SumShares { src, dst } => match (self.content(src), self.content(dst)) {
                (Content::Wire { bucket, from, kept }, Content::Flat { bucket: b, role: Role::Grad, pieces })
                    if bucket == b && !from.is_empty() && (from == pieces || kept.is_some() && pieces.is_empty()) =>
                {
                    Ok(())
                }
                _ => fault(dst, "expected shares of a bucket's gradients, and the piece that they are of; or pairs, and that piece or all of them"),
            },
            &Instr::SquareSum { src, dst, once } => self.square_sum(src, dst, once),
            &Instr::ClipScale { src, dst } => {
                if *self.content(src) != Content::Scalar(Scalar::NormSquared) {
                    return fault(src, "expected the squared norm");
                }
                self.expect_scalar(dst, Scalar::ClipScale)
            }
            Instr::TrustSums { state, grad, moments, scale, dst } => self.trust_sums(*state, *grad, moments, *scale, *dst),
            Instr::Update { state, grad, moments, param, scale, trust } => {
                self.updated(*state, *grad, moments, *scale)?;
                self.update(*state, *param, *trust)
            }
            Instr::Record(_) | Instr::Wait(_) => Ok(()),
        }
    }

    pub(super) fn buffer(&self, id: BufferId) -> &Buffer {
        &self.stage.buffers[id]
    }
    pub(super) fn content(&self, id: BufferId) -> &Content {
        &self.stage.buffers[id].content
    }

    /// The graph value and sharding that a buffer holds, for buffers that hold one.
    pub fn value(&self, id: BufferId) -> Option<(ValueId, Sharding)> {
        match self.content(id) {
            Content::Value { value, sharding } => Some((*value, sharding.clone())),
            &Content::Member { bucket, role: Role::Param, param } => {
                let member = self.stage.buckets[bucket].members.iter().find(|m| m.param == param)?;
                Some((self.graph.params[param].value, member.sharding.clone()))
            }
            Content::Member { .. }
            | Content::Flat { .. }
            | Content::Scalar(_)
            | Content::Trust { .. }
            | Content::Wire { .. }
            | Content::Frame
            | Content::Scratch => None,
        }
    }

    fn run(&self, id: NodeId, ins: &[BufferId], outs: &[BufferId], scratch: Option<BufferId>, write: Write) -> Result<(), Fault> {
        let node = &self.graph.nodes[id];
        let results = self.results(node, ins, outs)?;
        for ((&buffer, &value), result) in outs.iter().zip(&node.outputs).zip(&results) {
            let name = &self.graph.values[value].name;
            let claim = match self.content(buffer) {
                Content::Value { value: v, sharding } if *v == value && write == Write::Set => sharding.clone(),
                &Content::Member { bucket, role: Role::Grad, param } if self.graph.grads[param].contains(&value) => self.gradient(bucket, param),
                Content::Scalar(Scalar::Loss) if self.graph.loss == Some(value) => continue,
                Content::Value { value: v, .. } if *v == value => return fault(buffer, "only gradients and the loss are added to"),
                _ => return fault(buffer, format!("expected a buffer for `{name}`")),
            };
            if claim != *result {
                return fault(buffer, format!("`{name}` comes out as {}, the buffer claims {}", self.show(result), self.show(&claim)));
            }
        }
        let locals: Result<Vec<_>, String> = node
            .inputs
            .iter()
            .zip(ins)
            .map(|(&v, &b)| {
                let sharding = self.value(b).map_or_else(|| Sharding::replicated(0), |(_, s)| s);
                local(self.program, &self.graph.values[v].ty, &sharding)
            })
            .collect();
        let need = locals.map(|l| workspace_bytes(&node.op, &l.iter().collect::<Vec<_>>())).or_else(|why| fault(None, why))?;
        match scratch {
            Some(b) if *self.content(b) != Content::Scratch => fault(b, "expected a scratch buffer"),
            Some(b) if self.buffer(b).bytes < need => fault(b, format!("{} bytes of working memory, the op may use {need}", self.buffer(b).bytes)),
            None if need > 0 => fault(None, format!("no working memory, the op may use {need} bytes")),
            Some(_) | None => Ok(()),
        }
    }

    /// The shardings that a node's results have, given its operands' (and, for letters that only results have, the results' own claims).
    pub fn results(&self, node: &Node, ins: &[BufferId], outs: &[BufferId]) -> Result<Vec<Sharding>, Fault> {
        let ranks = |values: &[ValueId]| values.iter().map(|&v| self.graph.values[v].ty.dims.len()).collect::<Vec<_>>();
        let rule = rule(&node.op, &ranks(&node.inputs), &ranks(&node.outputs));
        let mut operands: Vec<Sharding> = Vec::new();
        for (&buffer, &value) in ins.iter().zip(&node.inputs) {
            match self.value(buffer) {
                Some((v, sharding)) if v == value => operands.push(sharding),
                _ => return fault(buffer, format!("expected an operand that holds `{}`", self.graph.values[value].name)),
            }
        }
        let turn = self.turn(&rule, ins, &operands)?;
        if let Some(first) = operands.iter().find(|s| !s.partial.is_empty()) {
            return match rule.linear {
                Linear::Yes if first.monoid != Monoid::Sum => fault(None, "only operands that wait for a sum are added before it"),
                Linear::Yes if operands.iter().all(|s| s == first) => Ok(vec![first.clone(); outs.len()]),
                Linear::Yes => fault(None, "operands that wait for a reduction are added only where all have the same sharding"),
                Linear::No => {
                    let at = operands.iter().position(|s| s == first).unwrap_or(0);
                    fault(ins[at], format!("the operand is {}: it must be reduced before it is read", self.show(first)))
                }
            };
        }
        let mut axes_of: Vec<(char, AxisSet)> = Vec::new();
        let claims: Vec<Option<Sharding>> = outs.iter().map(|&b| self.claim(b)).collect();
        let sides = rule.ins.iter().zip(operands.iter().map(Some)).zip(ins).map(|((l, s), &b)| (l, s, b, true));
        let results = rule.outs.iter().zip(&claims).zip(outs).map(|(((l, _), s), &b)| (l, s.as_ref(), b, false));
        for (labels, sharding, buffer, operand) in sides.chain(results) {
            let Some(sharding) = sharding else { continue };
            for (&label, &axes) in labels.iter().zip(&sharding.dims) {
                match axes_of.iter().find(|(l, _)| *l == label) {
                    Some(&(_, known)) if known != axes && operand => {
                        return fault(buffer, format!("factor `{label}` is split by {} here and by {} elsewhere", self.axes(axes), self.axes(known)));
                    }
                    Some(_) => {}
                    None => axes_of.push((label, axes)),
                }
            }
        }
        let mut assignment = Assignment::default();
        for (label, axes) in axes_of {
            if turn.is_some() && rule.blockwise.is_some_and(|of| of.keys == label) {
                // By the axes of the queries, which come before.
                assignment.assign(label, axes);
                continue;
            }
            if assignment.used().intersects(axes) {
                return fault(None, format!("factor `{label}` is split by an axis of {} that splits another factor too", self.axes(axes)));
            }
            if !axes.is_empty() && rule.factor(label).is_some_and(|f| f.split == Split::Whole) {
                return fault(None, format!("factor `{label}` is split by {}, but must be whole", self.axes(axes)));
            }
            assignment.assign(label, axes);
        }
        Ok(in_turn(&rule, rule.place(&assignment).outs, turn))
    }

    /// The sharding a result buffer claims, where it claims one.
    fn claim(&self, buffer: BufferId) -> Option<Sharding> {
        match self.content(buffer) {
            Content::Value { sharding, .. } => Some(sharding.clone()),
            &Content::Member { bucket, param, .. } => Some(self.gradient(bucket, param)),
            Content::Flat { .. } | Content::Scalar(_) | Content::Trust { .. } | Content::Wire { .. } | Content::Frame | Content::Scratch => None,
        }
    }

    /// How a contribution to a member's gradient is sharded before any reduction.
    fn gradient(&self, bucket: BucketId, param: crate::entity::ParamId) -> Sharding {
        let bucket = &self.stage.buckets[bucket];
        let member = bucket.members.iter().find(|m| m.param == param);
        member.map_or_else(|| Sharding::replicated(0), |m| m.sharding.clone().with_partial(Monoid::Sum, bucket.partial))
    }

    fn step(&self, src: BufferId, dst: BufferId, step: Step) -> Result<(), Fault> {
        let (Some((value, from)), Content::Value { value: v, sharding: to }) = (self.value(src), self.content(dst)) else {
            return fault(dst, "expected the buffer of a graph value");
        };
        if value != *v {
            return fault(dst, format!("holds `{}`, the source `{}`", self.graph.values[*v].name, self.graph.values[value].name));
        }
        let dim = match step {
            Step::AllReduce { .. } => None,
            Step::ReduceScatter { dim, .. } | Step::AllGather { dim, .. } | Step::Slice { dim, .. } => Some(dim),
        };
        let routed = self.graph.values[value].ty.layout != Layout::Dense;
        if routed && dim.is_some_and(|d| d < 3) {
            return fault(src, "rows in top-k layout are not in blocks of a token or expert dim");
        }
        if dim.is_some_and(|d| d as usize >= from.dims.len()) {
            return fault(src, format!("there is no dim {dim:?}"));
        }
        match step.apply(&from) {
            Err(why) => fault(src, why),
            Ok(result) if result != *to => fault(dst, format!("comes out as {}, the buffer claims {}", self.show(&result), self.show(to))),
            Ok(_) => Ok(()),
        }
    }

    /// Pairs from everybody to everybody.
    fn gather_pairs(&self, step: Step, stages: &[u32], src: BufferId, dst: BufferId) -> Result<(), Fault> {
        match (step, self.content(src), self.content(dst)) {
            (Step::AllGather { axes, dim: 0 }, Content::Wire { bucket, from: AxisSet::EMPTY, kept }, Content::Wire { bucket: b, from, kept: k })
                if (bucket, kept, axes) == (b, k, *from) && stages.is_empty() && self.buffer(src).dtype == self.buffer(dst).dtype =>
            {
                Ok(())
            }
            _ => fault(dst, "expected this rank's pairs, and by `all_gather` on one stage as many of each member, of the same bucket and type"),
        }
    }

    /// A collective on flat buffers or scalars. What is pending is content, which the data flow knows; here only the pieces must fit.
    fn flat_step(&self, src: BufferId, dst: BufferId, step: Step, pattern: Pattern) -> Result<(), Fault> {
        let axes = step.axes();
        if pattern != Pattern::AllGather
            && !matches!(step, Step::AllReduce { monoid: Monoid::Sum, .. } | Step::ReduceScatter { monoid: Monoid::Sum, .. })
        {
            return fault(src, "gradients and scalars are reduced by sum");
        }
        if self.buffer(src).dtype != self.buffer(dst).dtype {
            return fault(dst, "another element type than the source");
        }
        match (self.content(src), self.content(dst)) {
            (Content::Scalar(a), Content::Scalar(b)) if a == b && pattern == Pattern::AllReduce && *a != Scalar::ClipScale => Ok(()),
            (a @ (Content::Member { role: Role::Grad, .. } | Content::Trust { .. }), b) if a == b && pattern == Pattern::AllReduce => Ok(()),
            (&Content::Flat { bucket, role, pieces: from }, &Content::Flat { bucket: b, role: r, pieces: to }) if (bucket, role) == (b, r) => {
                if matches!(step, Step::ReduceScatter { dim, .. } | Step::AllGather { dim, .. } if dim != 0) {
                    return fault(src, "a flat buffer has dim 0 only");
                }
                if pattern != Pattern::AllGather && role != Role::Grad {
                    return fault(src, "only gradients are reduced");
                }
                if pattern.reduces() && from.intersects(axes) {
                    return fault(src, format!("ranks along {} have different pieces of it: there is nothing to sum", self.axes(from.and(axes))));
                }
                // Pieces are blocks of the one dim of a flat buffer; its pending axes are followed by the data flow.
                let flat = Sharding::of_dims(vec![from]).with_partial(Monoid::Sum, if pattern == Pattern::AllGather { AxisSet::EMPTY } else { axes });
                match step.apply(&flat) {
                    Err(why) => fault(src, why),
                    Ok(result) if result.dims[0] != to => fault(dst, format!("comes out in pieces over {}", self.axes(result.dims[0]))),
                    Ok(_) => Ok(()),
                }
            }
            _ => fault(dst, "expected the same scalar, member or bucket and role as the source"),
        }
    }

    fn add_into(&self, src: BufferId, dst: BufferId) -> Result<(), Fault> {
        match (self.content(src), self.content(dst)) {
            (&Content::Flat { bucket, role: Role::Grad, pieces }, &Content::Flat { bucket: b, role: Role::Grad, pieces: p })
                if (bucket, pieces) == (b, p) =>
            {
                Ok(())
            }
            (a @ Content::Member { role: Role::Grad, .. }, b) if a == b => Ok(()),
            (Content::Value { value, sharding }, &Content::Member { bucket, role: Role::Grad, param }) if self.graph.grads[param].contains(value) => {
                let claim = self.gradient(bucket, param);
                if *sharding == claim { Ok(()) } else { fault(src, format!("is {}, the gradient is {}", self.show(sharding), self.show(&claim))) }
            }
            (Content::Value { value, .. }, Content::Scalar(Scalar::Loss)) if self.graph.loss == Some(*value) => Ok(()),
            _ => fault(dst, "expected a contribution and the gradient it belongs to, equal pieces of one gradient, or the loss"),
        }
    }

    fn square_sum(&self, src: BufferId, dst: BufferId, once: AxisSet) -> Result<(), Fault> {
        let &Content::Flat { bucket, role: Role::Grad, pieces } = self.content(src) else {
            return fault(src, "expected the gradients of a bucket");
        };
        self.expect_scalar(dst, Scalar::NormSquared)?;
        for member in &self.stage.buckets[bucket].members {
            let replicated = self.real(self.program.mesh.all()).minus(member.sharding.used()).minus(pieces);
            if self.real(once) != replicated {
                let name = &self.graph.values[self.graph.params[member.param].value].name;
                let (once, replicated) = (self.axes(once), self.axes(replicated));
                return fault(src, format!("counts `{name}` once over {once}, but it is replicated over {replicated}"));
            }
        }
        Ok(())
    }

    /// Axes along which there is more than one rank.
    fn real(&self, axes: AxisSet) -> AxisSet {
        axes.iter().filter(|&a| self.program.mesh.axis(a).size > 1).collect()
    }

    /// What an optimizer step reads: the bucket.
    fn updated(&self, state: BufferId, grad: BufferId, moments: &[BufferId], scale: Option<BufferId>) -> Result<(), Fault> {
        let &Content::Flat { role, .. } = self.content(state) else { return fault(state, "expected the state of a bucket") };
        let compute = self.compute(state);
        self.beside(state, state, if own_master(compute) { Role::Param } else { Role::Master })?;
        self.beside(state, grad, Role::Grad)?;
        let roles = [Role::Moment1, Role::Moment2];
        let count = self.program.optimizer.map_or(0, |o| o.moments());
        if moments.len() != count || role == Role::Grad {
            return fault(None, format!("expected {count} moments"));
        }
        for (&id, role) in moments.iter().zip(roles) {
            self.beside(state, id, role)?;
        }
        match scale {
            Some(id) => self.expect_scalar(id, Scalar::ClipScale),
            None if compute.is_some_and(|t| t.scales_loss()) => {
                fault(None, "the loss is scaled: expected the factor that takes that from the gradients")
            }
            None => Ok(()),
        }
    }

    fn update(&self, state: BufferId, param: Option<BufferId>, trust: Option<BufferId>) -> Result<(), Fault> {
        match param {
            Some(id) if own_master(self.compute(state)) => return fault(id, "the parameters are their own master copy: there is no other to write"),
            Some(id) => self.beside(state, id, Role::Param)?,
            None if !own_master(self.compute(state)) => return fault(None, "the result must be written in the compute type too"),
            None => {}
        }
        match (trust, self.program.optimizer.is_some_and(Optimizer::trusts)) {
            (Some(id), true) => self.sums_of(state, id),
            (Some(id), false) => fault(id, "the optimizer takes no trust ratios"),
            (None, true) => fault(None, "expected the sums that the optimizer's trust ratios are of"),
            (None, false) => Ok(()),
        }
    }

    fn trust_sums(&self, state: BufferId, grad: BufferId, moments: &[BufferId], scale: Option<BufferId>, dst: BufferId) -> Result<(), Fault> {
        self.updated(state, grad, moments, scale)?;
        if !self.program.optimizer.is_some_and(Optimizer::trusts) {
            return fault(dst, "the optimizer takes no trust ratios");
        }
        self.sums_of(state, dst)?;
        let &Content::Trust { bucket } = self.content(dst) else { return Ok(()) };
        let split = |member: &crate::program::Member| self.real(member.sharding.used());
        let members = &self.stage.buckets[bucket].members;
        match members.iter().find(|m| split(m) != split(&members[0])) {
            Some(_) => fault(dst, "its members are split over different axes, so that no reduction is right for all"),
            None => Ok(()),
        }
    }

    /// Whether a buffer is for the sums of a state's bucket.
    fn sums_of(&self, state: BufferId, id: BufferId) -> Result<(), Fault> {
        match (self.content(state), self.content(id)) {
            (Content::Flat { bucket, .. }, Content::Trust { bucket: of }) if of == bucket => Ok(()),
            _ => fault(id, "expected the trust sums of the state's bucket"),
        }
    }

    /// The compute type of a state's bucket.
    fn compute(&self, state: BufferId) -> Option<DType> {
        let &Content::Flat { bucket, .. } = self.content(state) else { return None };
        self.stage.buckets[bucket].members.first().map(|m| self.graph.values[self.graph.params[m.param].value].ty.dtype)
    }

    /// Whether a buffer has another role of the same elements as a state.
    fn beside(&self, state: BufferId, id: BufferId, role: Role) -> Result<(), Fault> {
        match (self.content(state), self.content(id)) {
            (Content::Flat { bucket, pieces, .. }, Content::Flat { bucket: b, role: r, pieces: p }) if (b, *r, p) == (bucket, role, pieces) => Ok(()),
            _ => fault(id, format!("expected {} of the state's bucket, in the same pieces", role.name())),
        }
    }

    fn expect_scalar(&self, id: BufferId, scalar: Scalar) -> Result<(), Fault> {
        if *self.content(id) == Content::Scalar(scalar) { Ok(()) } else { fault(id, format!("expected {}", scalar.name())) }
    }

    pub fn axes(&self, axes: AxisSet) -> String {
        let names: Vec<&str> = axes.iter().map(|a| self.program.mesh.axis(a).name.as_str()).collect();
        if names.is_empty() { "no axis".into() } else { names.join("+") }
    }

    pub(super) fn show(&self, sharding: &Sharding) -> String {
        let dims: Vec<String> = sharding.dims.iter().map(|&d| if d.is_empty() { "_".into() } else { self.axes(d) }).collect();
        let partial = if sharding.partial.is_empty() {
            String::new()
        } else {
            format!(" partial {} over {}", sharding.monoid.name(), self.axes(sharding.partial))
        };
        let ring =
            sharding.ring.map_or_else(String::new, |r| format!(" in turn {} over differences {:?}", r.turn, r.differences().collect::<Vec<_>>()));
        format!("[{}]{partial}{ring}", dims.join(","))
    }
}

/// Whether parameters in the compute type are their own master copy.
fn own_master(compute: Option<DType>) -> bool {
    compute.is_none_or(|t| t == t.accumulator())
}
