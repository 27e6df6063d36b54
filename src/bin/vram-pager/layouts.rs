//! The tensor lists of published models, built from their architecture's own numbers.
//!
//! Names, types, shapes and order are those of the published checkpoints; a test holds the count and the
//! total bytes to them.

use serde::Deserialize;
use vram_pager::weights::Dtype;

/// A tensor of a list.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    #[serde(deserialize_with = "dtype")]
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
}

fn dtype<'de, D: serde::Deserializer<'de>>(json: D) -> Result<Dtype, D::Error> {
    let name = String::deserialize(json)?;
    Dtype::parse(&name).ok_or_else(|| serde::de::Error::custom(format_args!("unknown dtype `{name}`")))
}

/// A published model.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(crate) enum Model {
    /// FLUX.1-dev, an image transformer: 780 BF16 tensors, 23.8 GB
    #[value(name = "flux1-dev")]
    Flux1Dev,
    /// SDXL's denoising network: 1,680 F16 tensors, 5.1 GB
    #[value(name = "sdxl-unet")]
    SdxlUnet,
    /// Llama 3 8B, a decoder: 291 BF16 tensors, 16.1 GB
    #[value(name = "llama3-8b")]
    Llama3,
    /// T5 v1.1 XXL's encoder: 219 BF16 tensors, 9.5 GB
    #[value(name = "t5-xxl")]
    T5Xxl,
}

impl Model {
    /// The name on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Flux1Dev => "flux1-dev",
            Self::SdxlUnet => "sdxl-unet",
            Self::Llama3 => "llama3-8b",
            Self::T5Xxl => "t5-xxl",
        }
    }

    /// Its tensors, in file order.
    pub(crate) fn tensors(self) -> Vec<Tensor> {
        match self {
            Self::Flux1Dev => flux1_dev(),
            Self::SdxlUnet => sdxl_unet(),
            Self::Llama3 => llama3_8b(),
            Self::T5Xxl => t5_xxl(),
        }
    }
}

/// A list that grows.
struct List {
    dtype: Dtype,
    tensors: Vec<Tensor>,
}

impl List {
    fn new(dtype: Dtype) -> Self {
        Self { dtype, tensors: Vec::new() }
    }

    fn add(&mut self, name: String, shape: &[u64]) {
        self.tensors.push(Tensor { name, dtype: self.dtype, shape: shape.to_vec() });
    }

    fn weight(&mut self, module: &str, shape: &[u64]) {
        self.add(format!("{module}.weight"), shape);
    }

    /// A weight of this shape, and a bias as long as its first dimension.
    fn module(&mut self, module: &str, shape: &[u64]) {
        self.weight(module, shape);
        self.add(format!("{module}.bias"), &shape[..1]);
    }

    /// A scale and shift.
    fn norm(&mut self, module: &str, width: u64) {
        self.module(module, &[width]);
    }

    fn conv(&mut self, module: &str, to: u64, from: u64, kernel: u64) {
        self.module(module, &[to, from, kernel, kernel]);
    }
}

fn flux1_dev() -> Vec<Tensor> {
    const WIDTH: u64 = 3072;
    const HEAD: u64 = 128;
    let mut list = List::new(Dtype::BF16);
    list.module("img_in", &[WIDTH, 64]);
    list.module("txt_in", &[WIDTH, 4096]);
    for (name, from) in [("time_in", 256), ("vector_in", 768), ("guidance_in", 256)] {
        list.module(&format!("{name}.in_layer"), &[WIDTH, from]);
        list.module(&format!("{name}.out_layer"), &[WIDTH, WIDTH]);
    }
    for block in 0..19 {
        for stream in ["img", "txt"] {
            let stream = format!("double_blocks.{block}.{stream}");
            list.module(&format!("{stream}_mod.lin"), &[6 * WIDTH, WIDTH]);
            list.module(&format!("{stream}_attn.qkv"), &[3 * WIDTH, WIDTH]);
            list.add(format!("{stream}_attn.norm.query_norm.scale"), &[HEAD]);
            list.add(format!("{stream}_attn.norm.key_norm.scale"), &[HEAD]);
            list.module(&format!("{stream}_attn.proj"), &[WIDTH, WIDTH]);
            list.module(&format!("{stream}_mlp.0"), &[4 * WIDTH, WIDTH]);
            list.module(&format!("{stream}_mlp.2"), &[WIDTH, 4 * WIDTH]);
        }
    }
    for block in 0..38 {
        let block = format!("single_blocks.{block}");
        list.module(&format!("{block}.modulation.lin"), &[3 * WIDTH, WIDTH]);
        list.module(&format!("{block}.linear1"), &[7 * WIDTH, WIDTH]);
        list.module(&format!("{block}.linear2"), &[WIDTH, 5 * WIDTH]);
        list.add(format!("{block}.norm.query_norm.scale"), &[HEAD]);
        list.add(format!("{block}.norm.key_norm.scale"), &[HEAD]);
    }
    list.module("final_layer.adaLN_modulation.1", &[2 * WIDTH, WIDTH]);
    list.module("final_layer.linear", &[64, WIDTH]);
    list.tensors
}

fn llama3_8b() -> Vec<Tensor> {
    const WIDTH: u64 = 4096;
    const KEYS: u64 = 1024;
    const INNER: u64 = 14_336;
    const WORDS: u64 = 128_256;
    let mut list = List::new(Dtype::BF16);
    list.weight("model.embed_tokens", &[WORDS, WIDTH]);
    for layer in 0..32 {
        let mut add = |name: &str, shape: &[u64]| list.weight(&format!("model.layers.{layer}.{name}"), shape);
        add("self_attn.q_proj", &[WIDTH, WIDTH]);
        add("self_attn.k_proj", &[KEYS, WIDTH]);
        add("self_attn.v_proj", &[KEYS, WIDTH]);
        add("self_attn.o_proj", &[WIDTH, WIDTH]);
        add("mlp.gate_proj", &[INNER, WIDTH]);
        add("mlp.up_proj", &[INNER, WIDTH]);
        add("mlp.down_proj", &[WIDTH, INNER]);
        add("input_layernorm", &[WIDTH]);
        add("post_attention_layernorm", &[WIDTH]);
    }
    list.weight("model.norm", &[WIDTH]);
    list.weight("lm_head", &[WORDS, WIDTH]);
    list.tensors
}

fn t5_xxl() -> Vec<Tensor> {
    const WIDTH: u64 = 4096;
    const INNER: u64 = 10_240;
    let mut list = List::new(Dtype::BF16);
    list.weight("shared", &[32_128, WIDTH]);
    for block in 0..24 {
        let mut add =
            |name: &str, shape: &[u64]| list.weight(&format!("encoder.block.{block}.layer.{name}"), shape);
        for projection in ["q", "k", "v", "o"] {
            add(&format!("0.SelfAttention.{projection}"), &[WIDTH, WIDTH]);
        }
        if block == 0 {
            add("0.SelfAttention.relative_attention_bias", &[32, 64]);
        }
        add("0.layer_norm", &[WIDTH]);
        add("1.DenseReluDense.wi_0", &[INNER, WIDTH]);
        add("1.DenseReluDense.wi_1", &[INNER, WIDTH]);
        add("1.DenseReluDense.wo", &[WIDTH, INNER]);
        add("1.layer_norm", &[WIDTH]);
    }
    list.weight("encoder.final_layer_norm", &[WIDTH]);
    list.tensors
}

/// The width of SDXL's time embedding.
const TIME: u64 = 1280;

fn sdxl_unet() -> Vec<Tensor> {
    const WIDTHS: [u64; 3] = [320, 640, 1280];
    /// Transformer blocks an attention, by level.
    const DEPTHS: [u32; 3] = [0, 2, 10];
    let mut list = List::new(Dtype::F16);
    list.conv("conv_in", WIDTHS[0], 4, 3);
    list.module("time_embedding.linear_1", &[TIME, WIDTHS[0]]);
    list.module("time_embedding.linear_2", &[TIME, TIME]);
    list.module("add_embedding.linear_1", &[TIME, 2816]);
    list.module("add_embedding.linear_2", &[TIME, TIME]);

    // Each level hands its outputs to the same level on the way up.
    let mut skips = vec![WIDTHS[0]];
    let mut from = WIDTHS[0];
    for (level, (&to, &depth)) in WIDTHS.iter().zip(&DEPTHS).enumerate() {
        let block = format!("down_blocks.{level}");
        for layer in 0..2 {
            sdxl_attention(&mut list, &format!("{block}.attentions.{layer}"), to, depth);
            sdxl_resnet(&mut list, &format!("{block}.resnets.{layer}"), from, to);
            from = to;
            skips.push(to);
        }
        if level < 2 {
            list.conv(&format!("{block}.downsamplers.0.conv"), to, to, 3);
            skips.push(to);
        }
    }
    for (level, (&to, &depth)) in WIDTHS.iter().zip(&DEPTHS).rev().enumerate() {
        let block = format!("up_blocks.{level}");
        for layer in 0..3 {
            sdxl_attention(&mut list, &format!("{block}.attentions.{layer}"), to, depth);
            let skip = skips.pop().unwrap_or(0);
            sdxl_resnet(&mut list, &format!("{block}.resnets.{layer}"), from + skip, to);
            from = to;
        }
        if level < 2 {
            list.conv(&format!("{block}.upsamplers.0.conv"), to, to, 3);
        }
    }
    sdxl_attention(&mut list, "mid_block.attentions.0", WIDTHS[2], DEPTHS[2]);
    for layer in 0..2 {
        sdxl_resnet(&mut list, &format!("mid_block.resnets.{layer}"), WIDTHS[2], WIDTHS[2]);
    }
    list.norm("conv_norm_out", WIDTHS[0]);
    list.conv("conv_out", 4, WIDTHS[0], 3);
    list.tensors
}

fn sdxl_resnet(list: &mut List, name: &str, from: u64, to: u64) {
    list.norm(&format!("{name}.norm1"), from);
    list.conv(&format!("{name}.conv1"), to, from, 3);
    list.module(&format!("{name}.time_emb_proj"), &[to, TIME]);
    list.norm(&format!("{name}.norm2"), to);
    list.conv(&format!("{name}.conv2"), to, to, 3);
    if from != to {
        list.conv(&format!("{name}.conv_shortcut"), to, from, 1);
    }
}

/// An attention of `depth` transformer blocks; of none there is nothing.
fn sdxl_attention(list: &mut List, name: &str, width: u64, depth: u32) {
    const CONTEXT: u64 = 2048;
    if depth == 0 {
        return;
    }
    list.norm(&format!("{name}.norm"), width);
    list.module(&format!("{name}.proj_in"), &[width, width]);
    for block in 0..depth {
        let block = format!("{name}.transformer_blocks.{block}");
        for (number, from) in [(1, width), (2, CONTEXT)] {
            list.norm(&format!("{block}.norm{number}"), width);
            list.weight(&format!("{block}.attn{number}.to_q"), &[width, width]);
            list.weight(&format!("{block}.attn{number}.to_k"), &[width, from]);
            list.weight(&format!("{block}.attn{number}.to_v"), &[width, from]);
            list.module(&format!("{block}.attn{number}.to_out.0"), &[width, width]);
        }
        list.norm(&format!("{block}.norm3"), width);
        list.module(&format!("{block}.ff.net.0.proj"), &[8 * width, width]);
        list.module(&format!("{block}.ff.net.2"), &[width, 4 * width]);
    }
    list.module(&format!("{name}.proj_out"), &[width, width]);
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum as _;

    use super::*;

    /// Tensors and bytes as published.
    #[test]
    fn counts_and_totals_are_the_published_ones() {
        for (model, tensors, bytes) in [
            (Model::Flux1Dev, 780, 23_802_816_640),
            (Model::SdxlUnet, 1680, 5_134_927_368),
            (Model::Llama3, 291, 16_060_522_496),
            (Model::T5Xxl, 219, 9_524_621_312),
        ] {
            let list = model.tensors();
            assert_eq!(list.len(), tensors, "{}", model.name());
            let total: u64 = list.iter().map(|t| t.shape.iter().product::<u64>() * t.dtype.bits() / 8).sum();
            assert_eq!(total, bytes, "{}", model.name());
            let mut names: Vec<_> = list.iter().map(|tensor| &tensor.name).collect();
            names.sort();
            names.dedup();
            assert_eq!(names.len(), tensors, "{}: a name twice", model.name());
            assert_eq!(model.to_possible_value().unwrap().get_name(), model.name());
        }
    }
}
