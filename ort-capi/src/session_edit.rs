//! Sessions on models that a caller makes or changes, and what sessions log with.

use std::path::Path;

use ort_runtime::ir::{Graph, ValueInfo};
use ort_runtime::onnx::{FileAccess, Source};
use ort_runtime::spec::canonical_domain;
use ort_runtime::{Error, Model, Session as Engine, ValueSpec};

use crate::log::Scope;
use crate::model_proto::DeclaredModel;
use crate::run_options::RunOptions;
use crate::session::{Session, SessionPorts, load_failure, load_named, with_format_and_folder};
use crate::session_options::SessionOptions;
use crate::status::{Outcome, code, fail};

/// A model that a caller changes, and the options of the session that it becomes.
#[derive(Clone)]
pub(crate) struct Unfinished {
    pub(crate) model: DeclaredModel,
    pub(crate) options: SessionOptions,
}

impl Session {
    /// Builds a session on a model that a caller made.
    pub(crate) fn of_declared(options: Option<&SessionOptions>, model: DeclaredModel) -> Outcome<Session> {
        let (options, source) = declared_source(options, &model)?;
        Session::create(Some(&options), source)
    }

    /// Loads a model that a caller will change, and builds nothing yet.
    pub(crate) fn unfinished(options: Option<&SessionOptions>, source: Source) -> Outcome<Session> {
        let path = source.path().map(Path::to_path_buf);
        let failed = |error: Error| load_failure(path.as_deref(), &error);
        let model = DeclaredModel::read(&source).map_err(failed)?;
        let engine = Engine::builder(&Model::from_graph(Graph::default())).build()?;
        let ports = SessionPorts::none();
        let mut session = Session::with(engine, ports, None);
        session.load_unfinished(Unfinished { model, options: options.cloned().unwrap_or_default() })?;
        Ok(session)
    }

    /// Takes a changed model of a session that is not finished, if it is valid.
    pub(crate) fn load_unfinished(&mut self, unfinished: Unfinished) -> Outcome {
        let (options, source) = declared_source(Some(&unfinished.options), &unfinished.model)?;
        let loaded = load_named(&options, source)?;
        let outputs = loaded.graph().outputs.iter().map(|id| loaded.graph().value(*id));
        let spec = |value: &ValueInfo| ValueSpec {
            name: value.name.to_string(),
            ty: value.ty.clone(),
            has_default: false,
        };
        let ports = SessionPorts::of(&loaded, outputs.map(spec).collect());
        self.set_ports(ports);
        self.unfinished = Some(Box::new(unfinished));
        Ok(())
    }

    /// Refuses a session that the model editor has not finished.
    pub(crate) fn check_finished(&self) -> Outcome {
        match &self.unfinished {
            Some(_) => fail(code::FAIL, "Session not initialized.".to_owned()),
            None => Ok(()),
        }
    }

    /// Lets the lines of this thread be the session's for a run.
    pub(crate) fn log_scope(&self, options: Option<&RunOptions>) -> Option<Scope> {
        let log = self.log.as_ref()?;
        Some(Scope::enter(log, options.and_then(RunOptions::severity)))
    }

    /// The operator sets of the model, by domain.
    pub(crate) fn opsets(&self) -> Vec<(String, i64)> {
        let canonical = |(domain, version): &(String, i64)| (canonical_domain(domain).to_owned(), *version);
        match &self.unfinished {
            Some(unfinished) => unfinished.model.opsets(),
            None => self.engine.model().info().opsets.iter().map(canonical).collect(),
        }
    }
}

/// The source of a model that a caller made, and the options that give its weights.
pub(crate) fn declared_source(
    options: Option<&SessionOptions>,
    model: &DeclaredModel,
) -> Outcome<(SessionOptions, Source)> {
    let mut options = options.cloned().unwrap_or_default();
    // The model is an ONNX message now, whatever it was read from.
    options.entries.remove("session.load_model_format");
    for (name, tensor) in &model.weights {
        let given = options.initializers.iter().chain(&options.external_initializers);
        if !given.into_iter().any(|(known, _)| known == name) {
            options.external_initializers.push((name.clone(), tensor.clone()));
        }
    }
    let source = with_format_and_folder(Some(&options), Source::from_bytes(model.encode()))?;
    let folder = model.folder.clone();
    let source = match folder {
        Some(folder) => source.in_folder(folder, FileAccess::default()),
        None => source,
    };
    Ok((options, source))
}
