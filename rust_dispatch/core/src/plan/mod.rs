//! What a model takes of each rank's memory, by formula: nothing here reads a file or allocates
//! what it counts.

mod memory;
mod tensors;

pub use memory::{
    KvLoad, KvPlan, KvReads, MemoryPlan, PlanError, PlanOptions, RankWeights, default_page_size,
    state_ring, verify_rows,
};
pub use tensors::{PlannedTensor, Split, WeightDtype, WeightGroup, tensors};

#[cfg(test)]
mod tests;
