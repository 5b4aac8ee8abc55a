//! Attention on host slices, for scripts and tests: uploads, runs, waits, returns vectors.

use crate::error::{Error, Result};
use crate::ops::attention::{Attention, AttentionIo, Batch};
use crate::view::{DType, View};

/// A mask on the host.
#[derive(Clone, Copy, Debug, Default)]
pub enum HostMask<'a> {
    /// No mask.
    #[default]
    None,
    /// One byte an element, for [`MaskKind::Bool`](crate::MaskKind::Bool).
    Bool(&'a [u8]),
    /// Words of 32 keys, for [`MaskKind::Bits`](crate::MaskKind::Bits).
    Bits(&'a [u32]),
}

/// Tensors on the host, as f32, laid out as the [`Batch`] says.
#[derive(Clone, Copy, Debug)]
pub struct HostInput<'a> {
    /// Q.
    pub q: &'a [f32],
    /// K.
    pub k: &'a [f32],
    /// V.
    pub v: &'a [f32],
    /// The bias, if the descriptor has one.
    pub bias: Option<&'a [f32]>,
    /// The mask, if the descriptor has one.
    pub mask: HostMask<'a>,
}

/// Results on the host.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HostOutput {
    /// O, laid out as the [`Batch`] says; zero where nothing is written.
    pub out: Vec<f32>,
    /// LSE, if wanted.
    pub lse: Vec<f32>,
}

impl Attention {
    /// Runs on host slices, converted to the descriptor's types, and waits for the result.
    ///
    /// ```no_run
    /// # fn f(runtime: &wgpu_attention::Runtime) -> wgpu_attention::Result<()> {
    /// use wgpu_attention::{Attention, AttentionDesc, Batch, HostInput, HostMask, Lengths};
    /// let desc = AttentionDesc { heads: 2, kv_heads: 1, head_dim: 4, ..AttentionDesc::default() };
    /// let attention = Attention::new(runtime, &desc)?;
    /// let batch = Batch::new(&desc, Lengths::Uniform { batch: 1, len: 1 }, Lengths::Uniform { batch: 1, len: 3 });
    /// let input = HostInput { q: &[0.0; 8], k: &[0.0; 12], v: &[1.0; 12], bias: None, mask: HostMask::None };
    /// let output = pollster::block_on(attention.run(&batch, &input))?;
    /// assert_eq!(output.out, [1.0; 8]);
    /// # Ok(()) }
    /// ```
    pub async fn run(&self, batch: &Batch<'_>, input: &HostInput<'_>) -> Result<HostOutput> {
        let (runtime, desc) = (self.runtime(), self.desc());
        let schedule = self.schedule(batch)?;
        let (out_len, lse_len) = (schedule.out_len(), if desc.lse { batch.q.lse_len(desc.heads) } else { 0 });
        let tensor = |what: &str, values: &[f32], dtype: DType| {
            runtime.upload(what, &dtype.encode(values), wgpu::BufferUsages::STORAGE)
        };
        let q = tensor("q", input.q, desc.q_dtype)?;
        let k = tensor("k", input.k, desc.kv_dtype)?;
        let v = tensor("v", input.v, desc.kv_dtype)?;
        let bias = input.bias.map(|values| tensor("bias", values, desc.bias.unwrap_or_default())).transpose()?;
        let mask = match input.mask {
            HostMask::None => None,
            HostMask::Bool(bytes) => Some(runtime.upload("mask", bytes, wgpu::BufferUsages::STORAGE)?),
            HostMask::Bits(words) => {
                Some(runtime.upload("mask", bytemuck::cast_slice(words), wgpu::BufferUsages::STORAGE)?)
            }
        };
        input.check_mask(desc.mask)?;
        let result = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC;
        let out = runtime.buffer("out", out_len * desc.out_dtype.size(), result)?;
        let lse = runtime.buffer("lse", lse_len * 4, result)?;
        let io = AttentionIo {
            q: (&q).into(),
            k: (&k).into(),
            v: (&v).into(),
            out: (&out).into(),
            lse: desc.lse.then_some(View::from(&lse)),
            bias: bias.as_ref().map(View::from),
            mask: mask.as_ref().map(View::from),
        };
        let mut encoder = runtime.device().create_command_encoder(&Default::default());
        self.record(&mut encoder, &schedule, &io)?;
        runtime.queue().submit([encoder.finish()]);
        let out = runtime.read(&out, out_len * desc.out_dtype.size()).await?;
        let lse = if lse_len > 0 { runtime.read(&lse, lse_len * 4).await? } else { Vec::new() };
        Ok(HostOutput {
            out: desc.out_dtype.decode(&out, out_len as usize),
            lse: DType::F32.decode(&lse, lse_len as usize),
        })
    }
}

impl HostInput<'_> {
    fn check_mask(&self, kind: Option<crate::MaskKind>) -> Result<()> {
        use crate::MaskKind;
        match (kind, self.mask) {
            (Some(MaskKind::Bool), HostMask::Bits(_)) => Err(Error::shape("mask", "HostMask::Bool", "HostMask::Bits")),
            (Some(MaskKind::Bits), HostMask::Bool(_)) => Err(Error::shape("mask", "HostMask::Bits", "HostMask::Bool")),
            _ => Ok(()),
        }
    }
}
