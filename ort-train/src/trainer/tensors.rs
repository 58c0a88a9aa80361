//! Parameters, accumulated gradients and optimizer state: initialization, access and export.

use std::path::Path;

use ort_core::dtype::DType;
use ort_core::ir::Graph;
use ort_core::onnx::{Weights, save};
use ort_core::tensor::{Tensor, TensorBuffer};
use ort_core::{Result, ensure, error};

use super::Trainer;
use crate::graph::Parameter;
use crate::state::{gradient_name, state_name};
use crate::values::values_by_name;
use crate::weights::TrainableGraph;

impl Trainer {
    /// Returns the current value of a parameter.
    pub fn parameter(&mut self, name: &str) -> Result<Tensor> {
        self.detach();
        self.state.tensor(name)
    }

    /// Returns the mean of each parameter's gradients over the batches since the last update.
    pub fn grads(&mut self) -> Result<Vec<(String, Tensor)>> {
        ensure!(
            self.pending > 0,
            InvalidArgument,
            help = "accumulate a batch first",
            "there are no gradients"
        );
        self.detach();
        // The accumulators hold a sum over the batches, of gradients of the scaled loss.
        let scale = 1.0 / (self.pending as f64 * f64::from(self.loss_scale().unwrap_or(1.0)));
        let mut found = Vec::with_capacity(self.training.parameters.len());
        for Parameter { name, .. } in &self.training.parameters {
            let mut sum = self.state.on_host(self.state.get(&gradient_name(name))?)?;
            match sum.dtype() {
                DType::F64 => sum.as_mut_slice::<f64>()?.iter_mut().for_each(|each| *each *= scale),
                _ => sum.as_mut_slice::<f32>()?.iter_mut().for_each(|each| *each *= scale as f32),
            }
            found.push((name.clone(), sum.tensor()?));
        }
        Ok(found)
    }

    /// Writes the model with its trained weights as ONNX. The write is atomic: the file is complete
    /// or absent.
    pub fn export(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let graph = self.trained_graph()?;
        let weights = Weights::Inside;
        save(&graph, self.model.info(), path, &weights)
    }

    /// Returns the inference graph with the current weights.
    pub(crate) fn trained_graph(&mut self) -> Result<Graph> {
        self.detach();
        let mut graph = TrainableGraph::of(&self.model, &self.options)?.graph;
        let values = values_by_name(&graph);
        let trained = self.training.parameters.iter().map(|it| &it.name);
        for name in trained.chain(self.training.statistics.iter().map(|it| &it.name)) {
            let value = values.get(name.as_str()).copied();
            let value = value.ok_or_else(|| error!(Fail, "weight '{name}' is gone"))?;
            let tensor = self.state.tensor(name)?;
            // A default stays a default, so that the trained model has the inputs of the original.
            match graph.input_defaults.get_mut(&value) {
                Some(default) => *default = tensor,
                None => drop(graph.constants.insert(value, tensor)),
            }
        }
        Ok(graph)
    }

    /// Initializes parameters and running statistics from the model, and optimizer state with
    /// zeros.
    pub(super) fn fill_state(&mut self) -> Result<()> {
        for Parameter { name, tensor, .. } in &self.training.parameters {
            self.state.insert(name.clone(), TensorBuffer::copy_of(tensor)?);
            // The copy replaces the pages of the mapped file, so they need not stay resident.
            self.model.release(tensor);
        }
        for statistic in &self.training.statistics {
            self.state.insert(statistic.name.clone(), TensorBuffer::copy_of(&statistic.tensor)?);
            self.model.release(&statistic.tensor);
        }
        self.fill_states()?;
        self.hold_gradients(self.options.accumulate > 1)
    }

    /// Allocates zeroed optimizer state.
    pub(super) fn fill_states(&mut self) -> Result<()> {
        for Parameter { name, tensor, .. } in &self.training.parameters {
            for state in self.options.optimizer.states(tensor.dtype(), tensor.shape()) {
                let buffer = TensorBuffer::new(state.dtype, &state.shape)?;
                self.state.insert(state_name(name, state.kind), buffer);
            }
        }
        Ok(())
    }

    /// Allocates the gradient accumulators that do not exist yet, if `holds` is true.
    pub(crate) fn hold_gradients(&mut self, holds: bool) -> Result<()> {
        if !holds {
            return Ok(());
        }
        for Parameter { name, tensor, .. } in &self.training.parameters {
            let sum = gradient_name(name);
            // Existing accumulators keep their sums, to which later batches add.
            if !self.state.holds(&sum) {
                self.state.insert(sum, TensorBuffer::new(tensor.dtype(), tensor.shape())?);
            }
        }
        Ok(())
    }
}
