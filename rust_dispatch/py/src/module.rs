//! What Python sees. Errors are `ValueError` with one line; a panic becomes pyo3's
//! `PanicException`, so nothing unwinds into the interpreter.

/// The dispatcher's decisions: guard, deadlines, graph records.
#[pyo3::pymodule]
mod _dispatch {
    use lowlat_core::graph_key::Record;
    use lowlat_core::plan::{MemoryPlan, PlanOptions};
    use lowlat_core::{Reason, config, spec};
    use pyo3::exceptions::PyValueError;
    use pyo3::prelude::*;

    fn value_error(error: impl ToString) -> PyErr {
        PyValueError::new_err(error.to_string())
    }

    /// Version of the dispatcher.
    #[pyfunction]
    fn version() -> &'static str {
        env!("CARGO_PKG_VERSION")
    }

    /// Every reason, ascending: (number, name, words).
    #[pyfunction]
    fn reasons() -> Vec<(u32, &'static str, &'static str)> {
        let row = |reason: Reason| (reason.number(), reason.name(), reason.words());
        Reason::ALL.into_iter().map(row).collect()
    }

    /// Text of the config.json of a built-in model, or None.
    #[pyfunction]
    fn built_in(name: &str) -> Option<&'static str> {
        config::built_in(name)
    }

    /// Names of the built-in models.
    #[pyfunction]
    fn built_in_names() -> Vec<&'static str> {
        config::BUILT_IN.iter().map(|(name, _)| *name).collect()
    }

    /// Every reason why no built-in kernels can serve a model so, each with its number; [] when
    /// some can. `options` is a dict or JSON text with any of tp_size, isa, dtype, page_size,
    /// moe_runner_backend, server_args, env, features, resident_blocks. ValueError where an option
    /// is unknown or of another type.
    #[pyfunction]
    fn check(model_config_json: &str, options: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
        let text = match options.extract::<String>() {
            Ok(text) => text,
            Err(_) => {
                let dumps = options.py().import("json")?.getattr("dumps")?;
                dumps.call1((options,))?.extract()?
            }
        };
        let options = spec::CheckOptions::from_json(&text).map_err(value_error)?;
        let declines = spec::check(model_config_json, &options);
        Ok(declines.iter().map(ToString::to_string).collect())
    }

    /// What a model takes of each rank's memory: (JSON, table). `options` is JSON text with any of
    /// tp_size, page_size, context, requests. ValueError where the configuration or an option
    /// cannot be read, or the ranks do not divide the model.
    #[pyfunction]
    fn memory_plan(model_config_json: &str, options: &str) -> PyResult<(String, String)> {
        let config = config::ModelConfig::from_json(model_config_json).map_err(value_error)?;
        let options = PlanOptions::from_json(options).map_err(value_error)?;
        let plan = MemoryPlan::new(&config, &options).map_err(value_error)?;
        Ok((plan.to_json(), plan.to_text()))
    }

    /// Four budgets in nanoseconds: kernel < plugin < collective < engine. ValueError names every
    /// one that is out of order.
    #[pyclass(frozen, eq, skip_from_py_object)]
    #[derive(Clone, Copy, PartialEq)]
    struct DeadlineLadder(lowlat_core::DeadlineLadder);

    #[pymethods]
    impl DeadlineLadder {
        #[new]
        #[pyo3(signature = (*, kernel_ns, plugin_ns, collective_ns, engine_ns))]
        fn new(
            kernel_ns: u64,
            plugin_ns: u64,
            collective_ns: u64,
            engine_ns: u64,
        ) -> PyResult<Self> {
            lowlat_core::DeadlineLadder::new(kernel_ns, plugin_ns, collective_ns, engine_ns)
                .map(Self)
                .map_err(value_error)
        }

        /// How long a kernel waits for a peer.
        #[getter]
        fn kernel_ns(&self) -> u64 {
            self.0.kernel_ns()
        }

        /// How long the plugin waits for a step.
        #[getter]
        fn plugin_ns(&self) -> u64 {
            self.0.plugin_ns()
        }

        /// How long the collective library waits.
        #[getter]
        fn collective_ns(&self) -> u64 {
            self.0.collective_ns()
        }

        /// How long the engine's watchdog waits.
        #[getter]
        fn engine_ns(&self) -> u64 {
            self.0.engine_ns()
        }

        fn __repr__(&self) -> String {
            let [kernel, plugin, collective, engine] = self.0.budgets_ns();
            format!(
                "DeadlineLadder(kernel_ns={kernel}, plugin_ns={plugin}, \
                 collective_ns={collective}, engine_ns={engine})"
            )
        }
    }

    /// What was captured: graph keys, chosen paths and seals.
    #[pyclass(frozen)]
    struct GraphRecord(Record);

    #[pymethods]
    impl GraphRecord {
        /// Reads a record's JSON; ValueError in one line where it is none.
        #[staticmethod]
        fn from_json(text: &str) -> PyResult<Self> {
            Record::from_json(text).map(Self).map_err(value_error)
        }

        /// The record as JSON.
        fn to_json(&self) -> String {
            self.0.to_json()
        }

        /// Digest of what ranks must have in common; addresses stay out.
        #[getter]
        fn digest(&self) -> u64 {
            self.0.digest()
        }

        /// How `other` differs, one line a difference; [] when ranks could replay both together.
        fn differences(&self, other: &Self) -> Vec<String> {
            self.0.differences(&other.0)
        }

        fn __len__(&self) -> usize {
            self.0.entries().len()
        }
    }
}
