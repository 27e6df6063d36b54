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

/// The name of the unit that `tensor` belongs to; `is_tensor` says whether a name is one of the model's
/// tensors. A name without a dot is its own unit.
pub(crate) fn unit_name(tensor: &str, is_tensor: impl Fn(&str) -> bool) -> &str {
    // The shortest leading part that already names a parameter decides.
    let parameter = dots(tensor)
        .find(|&dot| matches!(last_component(&tensor[..dot]), "weight" | "bias") || is_tensor(&tensor[..dot]))
        .map_or(tensor, |dot| &tensor[..dot]);
    match parameter.rfind('.') {
        Some(dot) if dot > 0 => &parameter[..dot],
        // No module is named: the parameter stands for itself.
        _ => parameter,
    }
}

/// Where the dots are, from the left.
fn dots(name: &str) -> impl Iterator<Item = usize> {
    name.match_indices('.').map(|(at, _)| at)
}

fn last_component(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::unit_name;

    #[test]
    fn a_unit_is_the_name_without_its_last_component() {
        let none = |_: &str| false;
        for (tensor, unit) in [
            ("blocks.3.attn.qkv.weight", "blocks.3.attn.qkv"),
            ("blocks.3.attn.qkv.bias", "blocks.3.attn.qkv"),
            ("blocks.3.attn.qkv.weight_scale", "blocks.3.attn.qkv"),
            ("blocks.3.attn.qkv.scale_weight", "blocks.3.attn.qkv"),
            ("proj.weight.absmax", "proj"),
            ("proj.weight.quant_state.bitsandbytes__nf4", "proj"),
            ("proj.weight._scale", "proj"),
            ("blocks.0.modulation", "blocks.0"),
            ("logit_scale", "logit_scale"),
            ("weight", "weight"),
            ("weight.absmax", "weight"),
            (".weight", ".weight"),
            ("", ""),
            ("a.", "a"),
        ] {
            assert_eq!(unit_name(tensor, none), unit, "{tensor}");
        }
    }

    #[test]
    fn what_lies_below_a_tensor_belongs_to_its_unit() {
        let tensors = ["proj.qdata", "proj.qdata.scale", "table", "table.scale"];
        let is_tensor = |name: &str| tensors.contains(&name);
        assert_eq!(unit_name("proj.qdata.scale", is_tensor), "proj");
        assert_eq!(unit_name("table.scale", is_tensor), "table");
        assert_eq!(unit_name("table", is_tensor), "table");
    }
}
