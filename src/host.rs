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

/// Host tensors of one call on the device, for those who run it more than once, as to take its time.
#[derive(Debug)]
pub struct HostBuffers {
    q: wgpu::Buffer,
    k: wgpu::Buffer,
    v: wgpu::Buffer,
    bias: Option<wgpu::Buffer>,
    mask: Option<wgpu::Buffer>,
    out: wgpu::Buffer,
    out_len: u64,
    lse: Option<(wgpu::Buffer, u64)>,
}

impl HostBuffers {
    /// What [`Attention::record`] binds.
    pub fn io(&self) -> AttentionIo<'_> {
        AttentionIo {
            q: (&self.q).into(),
            k: (&self.k).into(),
            v: (&self.v).into(),
            out: (&self.out).into(),
            lse: self.lse.as_ref().map(|(buffer, _)| buffer.into()),
            bias: self.bias.as_ref().map(View::from),
            mask: self.mask.as_ref().map(View::from),
        }
    }
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
        let schedule = self.schedule(batch)?;
        let buffers = self.upload(batch, input)?;
        let mut encoder = self.runtime().device().create_command_encoder(&Default::default());
        self.record(&mut encoder, &schedule, &buffers.io())?;
        self.runtime().queue().submit([encoder.finish()]);
        self.download(&buffers).await
    }

    /// The tensors of a call on the device, converted to the descriptor's types, and room for its results.
    pub fn upload(&self, batch: &Batch, input: &HostInput) -> Result<HostBuffers> {
        let (runtime, desc) = (self.runtime(), self.desc());
        input.check_mask(desc.mask)?;
        let reach = self.reach(batch)?;
        let enough = |what: &str, given: usize, bytes: u64, size: u64| match bytes.div_ceil(size) {
            need if given as u64 >= need => Ok(()),
            need => Err(Error::shape(what, format!("at least {need} elements, as the batch says"), given)),
        };
        enough("q", input.q.len(), reach.q, desc.q_dtype.size())?;
        enough("k", input.k.len(), reach.k, desc.kv_dtype.size())?;
        enough("v", input.v.len(), reach.v, desc.kv_dtype.size())?;
        enough("bias", input.bias.map_or(0, <[f32]>::len), reach.bias, desc.bias.unwrap_or_default().size())?;
        match input.mask {
            HostMask::None => enough("mask", 0, reach.mask, 1)?,
            HostMask::Bool(bytes) => enough("mask", bytes.len(), reach.mask, 1)?,
            HostMask::Bits(words) => enough("mask", words.len(), reach.mask, 4)?,
        }
        let storage = wgpu::BufferUsages::STORAGE;
        let tensor = |what: &str, values: &[f32], dtype: DType| runtime.upload(what, &dtype.encode(values), storage);
        let result = |what: &str, bytes: u64| runtime.buffer(what, bytes, storage | wgpu::BufferUsages::COPY_SRC);
        let (out_len, lse_len) = (batch.out_len(desc), batch.q.lse_len(desc.heads));
        Ok(HostBuffers {
            q: tensor("q", input.q, desc.q_dtype)?,
            k: tensor("k", input.k, desc.kv_dtype)?,
            v: tensor("v", input.v, desc.kv_dtype)?,
            bias: input.bias.map(|values| tensor("bias", values, desc.bias.unwrap_or_default())).transpose()?,
            mask: match input.mask {
                HostMask::None => None,
                HostMask::Bool(bytes) => Some(runtime.upload("mask", bytes, storage)?),
                HostMask::Bits(words) => Some(runtime.upload("mask", bytemuck::cast_slice(words), storage)?),
            },
            out: result("out", out_len.saturating_mul(desc.out_dtype.size()))?,
            out_len,
            lse: if desc.lse { Some((result("lse", lse_len.saturating_mul(4))?, lse_len)) } else { None },
        })
    }

    /// The results of a call, after all work submitted so far.
    pub async fn download(&self, buffers: &HostBuffers) -> Result<HostOutput> {
        let dtype = self.desc().out_dtype;
        let out = self.runtime().read(&buffers.out, buffers.out_len * dtype.size()).await?;
        let lse = match &buffers.lse {
            Some((buffer, len)) => DType::F32.decode(&self.runtime().read(buffer, len * 4).await?, *len as usize),
            None => Vec::new(),
        };
        Ok(HostOutput { out: dtype.decode(&out, buffers.out_len as usize), lse })
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
