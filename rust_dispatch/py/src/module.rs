//! What Python sees. Errors are `ValueError` with one line; a panic becomes pyo3's
//! `PanicException`, so nothing unwinds into the interpreter.

use lowlat_core::config::{ModelConfig, ModelFamily};
use lowlat_core::guard::{Decline, Feature, OneOf, Requirements};
use lowlat_core::{Reason, spec};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use serde_json::json;

pub use _dispatch::{DeadlineLadder, GraphRecord};

/// A refusal, in one line.
pub fn value_error(error: impl ToString) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// The reason of that name.
pub fn named_reason(name: &str) -> PyResult<Reason> {
    let found = Reason::ALL.into_iter().find(|reason| reason.name() == name);
    found.ok_or_else(|| value_error(format!("{name} is no reason's name")))
}

/// The JSON text of what is a dict, or a text already.
pub fn json_text(given: &Bound<'_, PyAny>) -> PyResult<String> {
    if let Ok(text) = given.extract::<String>() {
        return Ok(text);
    }
    let dumps = given.py().import("json")?.getattr("dumps")?;
    dumps.call1((given,))?.extract()
}

/// Options as a dict or as JSON text.
pub fn check_options(options: &Bound<'_, PyAny>) -> PyResult<spec::CheckOptions> {
    spec::CheckOptions::from_json(&json_text(options)?).map_err(value_error)
}

/// A model's sizes and rules under the names of the kernels' `lowlat_model_config`; ranks, widths,
/// pages and deadlines are for the caller to add.
fn kernel_config_json(config: &ModelConfig) -> serde_json::Value {
    let id = |id: Option<u32>| id.map_or(-1, i64::from);
    let layers: Vec<_> = config
        .layers
        .iter()
        .map(|layer| {
            json!({
                "ratio": layer.ratio,
                "kv_source": id(layer.kv_source),
                "index_source": id(layer.index_source),
                "candidate_source": id(layer.candidate_source),
                "engram": id(layer.engram),
                "hash_gate": u32::from(layer.hash_gate),
            })
        })
        .collect();
    let engram = config.engram.as_ref();
    let tables = engram.map_or(&[][..], |engram| &engram.tables);
    let draft = config.draft.as_ref();
    let candidates = config.candidates;
    let fields = [
        (
            "kind",
            json!(match config.family {
                ModelFamily::V41 => 1,
                ModelFamily::V4 => 2,
            }),
        ),
        ("hidden", json!(config.hidden)),
        ("num_layers", json!(config.layers.len())),
        ("vocab", json!(config.vocab)),
        ("num_heads", json!(config.num_heads)),
        ("head_dim", json!(config.head_dim)),
        ("rope_dim", json!(config.rope_dim)),
        ("q_lora", json!(config.q_lora)),
        ("o_groups", json!(config.o_groups)),
        ("o_lora", json!(config.o_lora)),
        ("window", json!(config.window)),
        ("num_experts", json!(config.num_experts)),
        ("experts_per_token", json!(config.experts_per_token)),
        ("moe_intermediate", json!(config.moe_intermediate)),
        ("index_heads", json!(config.index_heads)),
        ("index_dim", json!(config.index_dim)),
        ("index_topk", json!(config.index_topk)),
        (
            "candidate_layer",
            json!(id(candidates.map(|candidates| candidates.layer))),
        ),
        (
            "candidate_blocks",
            json!(candidates.map_or(0, |candidates| candidates.num_blocks)),
        ),
        (
            "candidate_block_size",
            json!(candidates.map_or(0, |candidates| candidates.block_size)),
        ),
        ("scale_block", json!(config.scale_block)),
        ("sinkhorn_iters", json!(config.sinkhorn_iters)),
        ("norm_eps", json!(config.norm_eps)),
        ("hc_eps", json!(config.hc_eps)),
        ("swiglu_limit", json!(config.swiglu_limit)),
        ("routed_scaling", json!(config.routed_scaling)),
        ("rope_theta", json!(config.rope_theta)),
        ("compress_rope_theta", json!(config.compress_rope_theta)),
        ("yarn_factor", json!(config.yarn.factor)),
        ("yarn_beta_fast", json!(config.yarn.beta_fast)),
        ("yarn_beta_slow", json!(config.yarn.beta_slow)),
        (
            "yarn_original_positions",
            json!(config.yarn.original_positions),
        ),
        ("max_positions", json!(config.max_positions)),
        ("layers", json!(layers)),
        ("num_engrams", json!(tables.len())),
        (
            "engram_head_dim",
            json!(engram.map_or(0, |engram| engram.head_dim)),
        ),
        (
            "engram_pad_token",
            json!(engram.map_or(0, |engram| engram.pad_token)),
        ),
        ("image_token", json!(id(config.image_token))),
        (
            "engram_primes",
            json!(
                tables
                    .iter()
                    .map(|table| json!(table.primes))
                    .collect::<Vec<_>>()
            ),
        ),
        (
            "engram_multipliers",
            json!(
                tables
                    .iter()
                    .map(|table| json!(table.multipliers))
                    .collect::<Vec<_>>()
            ),
        ),
        (
            "num_draft_stages",
            json!(draft.map_or(0, |draft| draft.num_stages)),
        ),
        ("draft_block", json!(draft.map_or(0, |draft| draft.block))),
        (
            "draft_mask_token",
            json!(draft.map_or(0, |draft| draft.mask_token)),
        ),
        (
            "markov_rank",
            json!(draft.map_or(0, |draft| draft.markov_rank)),
        ),
        (
            "draft_experts",
            json!(draft.map_or(0, |draft| draft.num_experts)),
        ),
        (
            "draft_experts_per_token",
            json!(draft.map_or(0, |draft| draft.experts_per_token)),
        ),
        (
            "draft_target_layers",
            json!(draft.map_or(json!([]), |draft| json!(draft.target_layers))),
        ),
        ("state_ring", json!(lowlat_core::plan::state_ring(config))),
    ];
    let named = fields
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value));
    serde_json::Value::Object(named.collect())
}

fn settings(list: &[OneOf]) -> serde_json::Value {
    let rows = list.iter().map(|setting| {
        json!({
            "name": setting.name,
            "accepted": setting.accepted,
            "unset_accepted": setting.unset_accepted,
        })
    });
    rows.collect()
}

fn as_json(model_type: &str, spec: &Requirements) -> serde_json::Value {
    json!({
        "model_type": model_type,
        "name": spec.name,
        "isas": spec.isas,
        "tp_sizes": spec.tp_sizes,
        "dtypes": spec.dtypes,
        "model": settings(&spec.model),
        "server_args": settings(&spec.server_args),
        "env": settings(&spec.env),
        "resident_blocks": spec.resident_blocks,
        "features": spec.features.iter().map(|feature| feature.name()).collect::<Vec<_>>(),
    })
}

/// Name, dtype, shape, layout.
type FactRow = (String, String, Vec<i64>, String);
/// The same, and the setting that changes the layout.
type NeedRow = (String, String, Vec<i64>, String, Option<String>);

/// The dispatcher's decisions: guard, deadlines, agreement, steps, graph records.
#[pymodule]
mod _dispatch {
    use lowlat_core::InstantNs;
    use lowlat_core::config;
    use lowlat_core::graph_key::{KeyIdx, Record};
    use lowlat_core::guard::{TensorFact, TensorNeed};
    use lowlat_core::plan::{MemoryPlan, PlanOptions};

    use super::*;

    #[pymodule_export]
    use crate::group::{Ballot, Dispatcher, Rank, Seat, declining_ballot, step_digest};

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
        let options = check_options(options)?;
        let declines = spec::check(model_config_json, &options);
        Ok(declines.iter().map(ToString::to_string).collect())
    }

    /// What every set of built-in kernels needs, as a JSON list of {model_type, name, isas,
    /// tp_sizes, dtypes, model, server_args, env, resident_blocks, features}; model, server_args
    /// and env are lists of {name, accepted, unset_accepted}.
    #[pyfunction]
    fn requirements() -> String {
        let specs = spec::built_in();
        let rows = specs
            .iter()
            .map(|(family, spec)| as_json(family.model_type(), spec));
        rows.collect::<serde_json::Value>().to_string()
    }

    /// Every feature that kernels must accept by name: (name, the setting that switches it off).
    #[pyfunction]
    fn features() -> Vec<(&'static str, &'static str)> {
        Feature::all()
            .map(|feature| (feature.name(), feature.off()))
            .collect()
    }

    /// One line of a decline: the number of the reason of that name, what was seen and needed, and
    /// the setting that changes it.
    #[pyfunction]
    #[pyo3(signature = (reason, words, change=None))]
    fn decline(reason: &str, words: &str, change: Option<&str>) -> PyResult<String> {
        let decline = Decline::in_words(named_reason(reason)?, words);
        Ok(match change {
            Some(setting) => decline.change(setting),
            None => decline,
        }
        .to_string())
    }

    /// Every reason that the loaded tensors give against serving, each with its number. A fact is
    /// (name, dtype, shape, layout); a need is (name, dtype, shape, layout, change), with `change`
    /// the setting that changes the tensor's layout, or None.
    #[pyfunction]
    fn check_loaded(facts: Vec<FactRow>, needs: Vec<NeedRow>) -> Vec<String> {
        let facts: Vec<TensorFact> = facts
            .iter()
            .map(|(name, dtype, shape, layout)| TensorFact::new(name, dtype, shape, layout))
            .collect();
        let needs: Vec<TensorNeed> = needs
            .iter()
            .map(|(name, dtype, shape, layout, change)| TensorNeed {
                change: change.clone(),
                ..TensorNeed::new(name, dtype, shape, layout)
            })
            .collect();
        let declines = lowlat_core::guard::check_loaded(&facts, &needs);
        declines.iter().map(ToString::to_string).collect()
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

    /// What the kernels' lowlat_model_config takes of a model, as JSON under its names; what a
    /// rank, its steps and its caches add is not there. ValueError where the configuration cannot
    /// be read.
    #[pyfunction]
    fn kernel_config(model_config_json: &str) -> PyResult<String> {
        let config = config::ModelConfig::from_json(model_config_json).map_err(value_error)?;
        Ok(super::kernel_config_json(&config).to_string())
    }

    /// Four budgets in nanoseconds: kernel < plugin < collective < engine. ValueError names every
    /// one that is out of order.
    #[pyclass(frozen, eq, skip_from_py_object)]
    #[derive(Clone, Copy, PartialEq)]
    pub struct DeadlineLadder(pub lowlat_core::DeadlineLadder);

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

    /// Counts time against a budget; owns no clock and no thread, so somebody polls it. One gap
    /// between two polls counts at most `max_gap_ns`: while a machine sleeps, nothing can be late.
    /// ValueError for a budget or gap of 0.
    #[pyclass]
    pub struct Watchdog(lowlat_core::Watchdog);

    #[pymethods]
    impl Watchdog {
        #[new]
        #[pyo3(signature = (*, budget_ns, max_gap_ns))]
        fn new(budget_ns: u64, max_gap_ns: u64) -> PyResult<Self> {
            if budget_ns == 0 || max_gap_ns == 0 {
                return Err(value_error(
                    "a watchdog needs a budget and a gap above 0 ns",
                ));
            }
            Ok(Self(lowlat_core::Watchdog::new(budget_ns, max_gap_ns)))
        }

        /// Work begins, at `now_ns` of the caller's clock; ValueError while work runs.
        fn arm(&mut self, now_ns: u64) -> PyResult<()> {
            if self.0.is_armed() {
                return Err(value_error(
                    "the watchdog is armed; disarm it when work has ended",
                ));
            }
            self.0.arm(InstantNs(now_ns));
            Ok(())
        }

        /// Work has ended.
        fn disarm(&mut self) {
            self.0.disarm();
        }

        /// Counts the time since the last look: how late the work is, 0 within its budget, or None
        /// while nothing runs.
        fn late_ns(&mut self, now_ns: u64) -> Option<u64> {
            match self.0.health(InstantNs(now_ns)) {
                lowlat_core::Health::Idle => None,
                lowlat_core::Health::OnTime => Some(0),
                lowlat_core::Health::Overdue { late_ns } => Some(late_ns),
            }
        }
    }

    /// What was captured: graph keys, chosen paths and seals.
    #[pyclass(frozen)]
    pub struct GraphRecord(pub Record);

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

        /// Whether the graph at place `idx` still reads what it read at capture, given what is
        /// there now, in the same order; ValueError names the first thing that changed.
        fn check_seals(&self, idx: u32, seals: Vec<crate::group::SealRow>) -> PyResult<()> {
            if self.0.entries().len() <= idx as usize {
                return Err(value_error(format!("the record has no graph at {idx}")));
            }
            let views = seals.iter().map(crate::group::seal_view);
            self.0.check_seals(KeyIdx(idx), views).map_err(value_error)
        }

        fn __len__(&self) -> usize {
            self.0.entries().len()
        }
    }
}
