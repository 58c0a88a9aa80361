//! Independent dimensions: runs whose inputs give one dimension name several sizes.
//!
//! Exporters use dimension names as documentation, and ONNX Runtime does not compare them. In this
//! runtime, inference, rewrites and plans assume that equal names mean equal sizes. So the first
//! run whose inputs contradict this compiles the model again, with a unique name for each dimension
//! of each input. The new session serves all such runs from then on; other runs and their plans do
//! not change. To the caller the two are one session: their runs share one budget and reuse each
//! other's idle memory. Strict sessions, sessions that update inputs, graphs with gradients and
//! graphs built by hand return the error instead.
//!
//! A graph that is optimized for another runtime has no such fallback. So it is rewritten with
//! independent dimensions, and its dimension names are restored afterwards.

use std::sync::{Arc, PoisonError};

use ort_alloc::fork::get_or_init;

use super::{Independent, Model, Session, SessionBuilder};
use crate::dim::Dim;
use crate::ir::{Graph, SymShape, ValueType};
use crate::rewrite::Report;
use crate::spec::infer_until;
use crate::{Error, Result, Within};

impl Session {
    /// The sessions that are one session to the caller: this one, and the one with independent
    /// dimensions if it was built.
    pub(super) fn parts(&self) -> Vec<&Session> {
        std::iter::once(self).chain(self.independent.built()).collect()
    }

    /// The session for a run whose inputs contradict the dimension names; `conflict` is the
    /// contradiction.
    ///
    /// # Errors
    ///
    /// `conflict` itself, if the session is strict, or if only the names tell which sizes are
    /// equal. The latter is so for graphs that were built by hand, for graphs with gradients, and
    /// for sessions that update inputs.
    pub(super) fn independent(&self, conflict: Error) -> Result<Arc<Session>> {
        let Independent { settings, session, building } = &self.independent;
        if !settings.may_be_independent() {
            return Err(conflict);
        }
        // A build that panicked has not set `session`, so the next run may try again.
        let _building = building.get().lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(session) = session.get() {
            return Ok(session.clone());
        }
        // ONNX Runtime accepts such inputs silently.
        tracing::info!(
            "the inputs give one dimension name two sizes ({}); compiling the model again for such runs, without \
             relying on the names; to avoid this, give equal sizes, or export the model with a name for each dimension",
            conflict.located_message()
        );
        // A second program needs memory that may have become free since this session was built.
        self.executor.follow_machine();
        let built = settings.with_independent_dims(self);
        let built = built.within(|| "compiling with independent dimensions")?;
        Ok(get_or_init(session, || Arc::new(built)).clone())
    }
}

impl SessionBuilder {
    fn may_be_independent(&self) -> bool {
        !self.is_strict() && self.updates.is_empty() && self.model.may_be_independent()
    }

    /// The graph optimized without relying on dimension names, with those names restored.
    pub(super) fn optimized_with_independent_dims(mut self) -> Result<(Graph, Report)> {
        let named = self.model.clone();
        self.model = named.with_independent_dims()?;
        let (mut graph, report) = self.optimized_as_named()?;
        restore_names(&mut graph, named.graph());
        infer_until(&mut graph, named.limits().until())?;
        Ok((graph, report))
    }

    /// Builds a session on the same devices and in the same budget, which reuses the idle memory of
    /// `first`.
    fn with_independent_dims(&self, first: &Session) -> Result<Session> {
        let mut settings = self.clone();
        settings.model = self.model.with_independent_dims()?;
        // The devices are open. Naming their providers as well would open them again.
        settings.devices.clone_from(&first.executor.compiled.devices);
        settings.providers.clear();
        // A cache entry is found by the model's content, which is the same for both sessions.
        settings.cache_dir = None;
        // The shared budget has the limit already.
        settings.memory_limit = None;
        settings.budget = Some(first.executor.compiled.budget.clone());
        // A budget that is passed on counts as the caller's limit unless this says otherwise.
        settings.follows_machine = first.executor.machine.is_some();
        let mut session = settings.build()?;
        session.executor.budget = first.executor.budget.clone();
        session.executor.kept = first.executor.kept.clone();
        session.executor.machine = first.executor.machine.clone();
        Ok(session)
    }
}

impl Model {
    /// The model with a unique name for each dimension of each input, inferred again.
    fn with_independent_dims(&self) -> Result<Model> {
        let mut graph = self.graph().clone();
        forget_names(&mut graph);
        for id in graph.inputs.clone() {
            let input = graph.value_mut(id);
            let (declared, name) = (self.graph().value(id).ty.shape(), input.name.clone());
            if let (Some(declared), ValueType::Tensor(tensor)) = (declared, &mut input.ty) {
                tensor.shape = Some(own_names(&name, declared));
            }
        }
        infer_until(&mut graph, self.limits().until())?;
        Ok(self.with_graph(graph))
    }
}

/// The shape with its constant sizes, and a symbol of its own for each other axis.
fn own_names(input: &str, shape: &[Dim]) -> SymShape {
    let own = |(axis, dim): (usize, &Dim)| match dim.as_constant() {
        Some(_) => dim.clone(),
        None => Dim::named(&format!("{input}.{axis}")),
    };
    shape.iter().enumerate().map(own).collect()
}

/// Gives inputs and outputs the types that they have in `named`. The caller infers all others.
fn restore_names(graph: &mut Graph, named: &Graph) {
    forget_names(graph);
    let values = |graph: &Graph| [&graph.inputs[..], &graph.outputs].concat();
    for (id, named_id) in values(graph).into_iter().zip(values(named)) {
        // An output that was folded is a constant, whose type is exact already.
        if !graph.constants.contains_key(&id) {
            graph.value_mut(id).ty = named.value(named_id).ty.clone();
        }
    }
}

/// Removes everything that was inferred from dimension names from the types and elements of all
/// values.
fn forget_names(graph: &mut Graph) {
    for id in graph.value_ids() {
        let value = graph.value_mut(id);
        value.symbolic = None;
        forget_in(&mut value.ty);
    }
    graph.nodes.iter_mut().flat_map(|node| &mut node.subgraphs).for_each(|sub| forget_names(&mut sub.graph));
}

fn forget_in(ty: &mut ValueType) {
    match ty {
        ValueType::Tensor(tensor) | ValueType::Sparse(tensor) => {
            let open = tensor.shape.iter_mut().flatten().filter(|dim| dim.as_constant().is_none());
            open.for_each(|dim| *dim = Dim::unknown());
        }
        ValueType::Sequence(inner) | ValueType::Optional(inner) | ValueType::Map(_, inner) => {
            forget_in(inner)
        }
        ValueType::Unknown => {}
    }
}
