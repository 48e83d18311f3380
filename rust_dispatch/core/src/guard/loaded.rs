//! The second look: the tensors that were really loaded, before the build reads their addresses.

use super::Decline;
use crate::reason::Reason;

/// A loaded tensor, as the engine holds it.
///
/// ```
/// use lowlat_core::guard::{TensorFact, TensorNeed, check_loaded};
/// let fact = TensorFact::new("norm.weight", "bf16", &[4096], "row_major");
/// let need = TensorNeed::new("norm.weight", "bf16", &[5120], "row_major");
/// let declines = check_loaded(&[fact], &[need]);
/// assert_eq!(
///     declines[0].to_string(),
///     "[112] shape of norm.weight is [4096]; these kernels need [5120]"
/// );
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorFact {
    /// The tensor's name in the model.
    pub name: String,
    /// Its dtype, such as `bf16`, `e4m3`, `fp4x2`.
    pub dtype: String,
    /// Elements of each dimension on this rank.
    pub shape: Vec<i64>,
    /// How it lies in memory: `row_major`, or the name of a tiling such as `marlin`.
    pub layout: String,
}

impl TensorFact {
    /// A loaded tensor.
    pub fn new(name: &str, dtype: &str, shape: &[i64], layout: &str) -> Self {
        Self {
            name: name.to_owned(),
            dtype: dtype.to_owned(),
            shape: shape.to_vec(),
            layout: layout.to_owned(),
        }
    }
}

/// A tensor that the kernels read, and how it must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorNeed {
    /// What must be there.
    pub tensor: TensorFact,
    /// The setting that changes its layout, where there is one.
    pub change: Option<String>,
}

impl TensorNeed {
    /// A needed tensor.
    pub fn new(name: &str, dtype: &str, shape: &[i64], layout: &str) -> Self {
        Self {
            tensor: TensorFact::new(name, dtype, shape, layout),
            change: None,
        }
    }

    /// The same need, with the setting that changes the tensor's layout.
    #[must_use]
    pub fn change(mut self, setting: &str) -> Self {
        self.change = Some(setting.to_owned());
        self
    }
}

/// Every reason that the loaded tensors give against serving; empty when there is none. Tensors
/// that nobody needs are not looked at.
pub fn check_loaded(facts: &[TensorFact], needs: &[TensorNeed]) -> Vec<Decline> {
    let mut declines = Vec::new();
    for TensorNeed {
        tensor: need,
        change,
    } in needs
    {
        let name = &need.name;
        let Some(fact) = facts.iter().find(|fact| fact.name == *name) else {
            let needed = format!("{} {:?}", need.dtype, need.shape);
            declines.push(Decline::new(
                Reason::TensorMissing,
                name,
                "not loaded",
                needed,
            ));
            continue;
        };
        let mut differs = |reason, what: &str, seen: String, needed: String| {
            if seen != needed {
                let mut decline = Decline::new(reason, format!("{what} of {name}"), seen, needed);
                decline.change.clone_from(change);
                declines.push(decline);
            }
        };
        differs(
            Reason::TensorDtype,
            "dtype",
            fact.dtype.clone(),
            need.dtype.clone(),
        );
        let shapes = [&fact.shape, &need.shape].map(|shape| format!("{shape:?}"));
        let [seen, needed] = shapes;
        differs(Reason::TensorShape, "shape", seen, needed);
        differs(
            Reason::TensorLayout,
            "layout",
            fact.layout.clone(),
            need.layout.clone(),
        );
    }
    declines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_difference_of_every_tensor_is_told_at_once() {
        let facts = [
            TensorFact::new("a", "fp32", &[2, 3], "interleaved"),
            TensorFact::new("unneeded", "u8", &[1], "odd"),
        ];
        let needs = [
            TensorNeed::new("a", "bf16", &[3, 2], "marlin").change("--moe-runner-backend marlin"),
            TensorNeed::new("b", "e4m3", &[4], "row_major"),
        ];
        let texts: Vec<String> = check_loaded(&facts, &needs)
            .iter()
            .map(ToString::to_string)
            .collect();
        let change = "(change: --moe-runner-backend marlin)";
        assert_eq!(
            texts,
            [
                format!("[111] dtype of a is fp32; these kernels need bf16 {change}"),
                format!("[112] shape of a is [2, 3]; these kernels need [3, 2] {change}"),
                format!("[113] layout of a is interleaved; these kernels need marlin {change}"),
                "[110] b is not loaded; these kernels need e4m3 [4]".to_owned(),
            ]
        );
        let exact = [TensorFact::new("b", "e4m3", &[4], "row_major")];
        assert!(check_loaded(&exact, &needs[1..]).is_empty());
    }
}
