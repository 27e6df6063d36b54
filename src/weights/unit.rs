//! Which tensors make a unit: what a runner faults in one call.
//!
//! A unit is a module's tensors, and a tensor's name is its module's path and the parameter's name. The
//! parameter's name is the last dotted component, with two exceptions that keep the side tensors of
//! quantised weights with their weight:
//!
//! - below a component `weight` or `bias` everything belongs to the parameter
//!   (`proj.weight.absmax`, `proj.weight._scale`);
//! - below a name that is itself a tensor everything belongs to that tensor.
//!
//! `proj.weight_scale` and `proj.scale_weight` need no rule: they are parameters of `proj`.
//!
//! Pure; imports nothing of this crate.

#![deny(unsafe_code)]

/// The name of the unit that `tensor` belongs to; `ancestor` is the length of its shortest leading part
/// that is itself a tensor, see [`shortest_ancestors`]. A name without a dot is its own unit.
pub(crate) fn unit_name(tensor: &str, ancestor: Option<usize>) -> &str {
    let below_weight = tensor
        .match_indices('.')
        .map(|(dot, _)| dot)
        .find(|&dot| ["weight", "bias"].iter().any(|word| ends_with_component(&tensor[..dot], word)));
    // The shortest leading part that already names a parameter decides.
    let end = ancestor.into_iter().chain(below_weight).min().unwrap_or(tensor.len());
    let parameter = &tensor[..end];
    match parameter.rfind('.') {
        Some(dot) if dot > 0 => &parameter[..dot],
        // No module is named: the parameter stands for itself.
        _ => parameter,
    }
}

fn ends_with_component(name: &str, component: &str) -> bool {
    name.strip_suffix(component).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// For each name of a sorted list, the length of the shortest other name in it that it lies below, as
/// `a.b.c` lies below `a.b` and `a`.
///
/// One sweep, because a damaged file may have names of megabytes: whatever begins with a name follows it
/// in the order, so the names that the current one begins with form a stack.
pub(crate) fn shortest_ancestors<'n>(sorted: impl IntoIterator<Item = &'n str>) -> Vec<Option<usize>> {
    let mut stack: Vec<usize> = Vec::new();
    let mut previous = "";
    let mut ancestors = Vec::new();
    for name in sorted {
        let common = previous.bytes().zip(name.bytes()).take_while(|(a, b)| a == b).count();
        while stack.last().is_some_and(|&length| length > common) {
            stack.pop();
        }
        ancestors.push(stack.iter().copied().find(|&length| name.as_bytes().get(length) == Some(&b'.')));
        stack.push(name.len());
        previous = name;
    }
    ancestors
}

#[cfg(test)]
mod tests {
    use super::{shortest_ancestors, unit_name};

    #[test]
    fn a_unit_is_the_name_without_its_last_component() {
        for (tensor, unit) in [
            ("blocks.3.attn.qkv.weight", "blocks.3.attn.qkv"),
            ("blocks.3.attn.qkv.bias", "blocks.3.attn.qkv"),
            ("blocks.3.attn.qkv.weight_scale", "blocks.3.attn.qkv"),
            ("blocks.3.attn.qkv.scale_weight", "blocks.3.attn.qkv"),
            ("proj.weight.absmax", "proj"),
            ("proj.weight.quant_state.bitsandbytes__nf4", "proj"),
            ("proj.weight._scale", "proj"),
            ("proj.overweight.x", "proj.overweight"),
            ("blocks.0.modulation", "blocks.0"),
            ("logit_scale", "logit_scale"),
            ("weight", "weight"),
            ("weight.absmax", "weight"),
            (".weight", ".weight"),
            ("", ""),
            ("a.", "a"),
        ] {
            assert_eq!(unit_name(tensor, None), unit, "{tensor}");
        }
    }

    #[test]
    fn what_lies_below_a_tensor_belongs_to_its_unit() {
        let mut names = [
            "proj.qdata",
            "proj.qdata.scale",
            "proj.qdata.scale.x",
            "proj.qdata-y.z",
            "table",
            "table.scale",
        ];
        names.sort_unstable();
        let units: Vec<_> = names
            .iter()
            .zip(shortest_ancestors(names))
            .map(|(name, ancestor)| (*name, unit_name(name, ancestor)))
            .collect();
        assert_eq!(
            units,
            [
                ("proj.qdata", "proj"),
                ("proj.qdata-y.z", "proj.qdata-y"),
                ("proj.qdata.scale", "proj"),
                ("proj.qdata.scale.x", "proj"),
                ("table", "table"),
                ("table.scale", "table"),
            ]
        );
    }

    #[test]
    fn names_of_megabytes_are_grouped_in_one_sweep() {
        let name = "a.".repeat(4 << 20);
        let names = ["a", &name[..1 << 20], &name];
        assert_eq!(shortest_ancestors(names), [None, Some(1), Some(1)]);
        assert_eq!(unit_name(&name, Some(1)), "a");
        assert_eq!(unit_name(&name, None).len(), name.len() - 1);
    }
}
