//! How tensors lie in buffers.

use half::{bf16, f16};

use crate::error::{Error, Result};

/// Element type of a tensor in a buffer. Arithmetic is f32 whatever the storage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE single precision.
    #[default]
    F32,
    /// IEEE half precision; no device feature is needed.
    F16,
    /// bfloat16, the upper 16 bits of an f32.
    Bf16,
}

impl DType {
    /// All of them.
    pub const ALL: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];

    /// Bytes of one element.
    pub const fn size(self) -> u64 {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::Bf16 => 2,
        }
    }

    /// `f32`, `f16` or `bf16`.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
        }
    }

    /// The part that loads or stores (`what`) this type with this width.
    pub(crate) fn part(self, what: &str, width: Width) -> String {
        let suffix = match width {
            Width::One => "_scalar",
            Width::Eight if what == "load" && self.size() == 2 => "_eights",
            Width::Four | Width::Eight => "",
        };
        format!("{what}_{self}{suffix}")
    }

    /// The bytes of `values` in this type, rounded to nearest even, padded with zeros to whole 32-bit words.
    pub fn encode(self, values: &[f32]) -> Vec<u8> {
        let mut bytes: Vec<u8> = match self {
            DType::F32 => bytemuck::cast_slice(values).to_vec(),
            DType::F16 => values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
            DType::Bf16 => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
        };
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    /// The first `count` elements in `bytes`; fewer if there are fewer.
    pub fn decode(self, bytes: &[u8], count: usize) -> Vec<f32> {
        let half = |c: &[u8]| u16::from_le_bytes([c[0], c[1]]);
        match self {
            DType::F32 => {
                bytes.chunks_exact(4).take(count).map(|c| f32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect()
            }
            DType::F16 => bytes.chunks_exact(2).take(count).map(|c| f16::from_bits(half(c)).to_f32()).collect(),
            DType::Bf16 => bytes.chunks_exact(2).take(count).map(|c| bf16::from_bits(half(c)).to_f32()).collect(),
        }
    }

    /// `value` as this type can hold it.
    pub fn round(self, value: f32) -> f32 {
        match self {
            DType::F32 => value,
            DType::F16 => f16::from_f32(value).to_f32(),
            DType::Bf16 => bf16::from_f32(value).to_f32(),
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Elements that a kernel reads or writes at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Width {
    One,
    Four,
    Eight,
}

impl Width {
    pub(crate) const ALL: [Width; 3] = [Width::One, Width::Four, Width::Eight];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Width::One => "scalar",
            Width::Four => "fours",
            Width::Eight => "eights",
        }
    }

    /// At most four, for kernels that take no more.
    pub(crate) fn narrow(self) -> Width {
        self.min(Width::Four)
    }
}

/// A range of a caller's buffer, from `offset` bytes on; how far it reaches follows from the shapes.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// A buffer with usage `STORAGE`.
    pub buffer: &'a wgpu::Buffer,
    /// In bytes, a multiple of the device's `min_storage_buffer_offset_alignment` (256 by default).
    /// Finer offsets go into [`Layout::offset`].
    pub offset: u64,
}

impl<'a> From<&'a wgpu::Buffer> for View<'a> {
    fn from(buffer: &'a wgpu::Buffer) -> Self {
        View { buffer, offset: 0 }
    }
}

/// Distances between neighbours in elements, of a tensor of rows of heads: element (b, s, h, d) lies at
/// `offset + b·batch + s·seq + h·head + d`. The last dimension is contiguous.
///
/// Interleaved K and V in one buffer are two layouts with the same strides and different offsets.
///
/// ```
/// use wgpu_attention::Layout;
/// // [batch, 128, 8, 64] and [batch, 8, 128, 64]
/// assert_eq!(Layout::bshd(128, 8, 64), Layout { offset: 0, batch: 128 * 8 * 64, seq: 8 * 64, head: 64 });
/// assert_eq!(Layout::bhsd(128, 8, 64), Layout { offset: 0, batch: 128 * 8 * 64, seq: 64, head: 128 * 64 });
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Layout {
    /// Of the first element.
    pub offset: u64,
    /// From a sequence to the next. Ragged tensors have no such dimension and ignore it.
    pub batch: u64,
    /// From a token to the next.
    pub seq: u64,
    /// From a head to the next.
    pub head: u64,
}

impl Layout {
    /// Contiguous `[batch, len, heads, dim]`, and with any `len` the ragged `[total, heads, dim]`.
    pub const fn bshd(len: u32, heads: u32, dim: u32) -> Self {
        let (len, heads, dim) = (len as u64, heads as u64, dim as u64);
        let seq = heads * dim; // two u32 fit
        Layout { offset: 0, batch: len.saturating_mul(seq), seq, head: dim }
    }

    /// Contiguous `[batch, heads, len, dim]`.
    pub const fn bhsd(len: u32, heads: u32, dim: u32) -> Self {
        let (len, heads, dim) = (len as u64, heads as u64, dim as u64);
        let head = len * dim; // two u32 fit
        Layout { offset: 0, batch: head.saturating_mul(heads), seq: dim, head }
    }

    /// How many elements can be read at a time: rows begin at multiples of that and have a multiple of it.
    pub(crate) fn width(&self, dim: u32) -> Width {
        let all =
            |n: u64| [self.offset, self.batch, self.seq, self.head, dim as u64].iter().all(|x| x.is_multiple_of(n));
        match () {
            _ if all(8) => Width::Eight,
            _ if all(4) => Width::Four,
            _ => Width::One,
        }
    }
}

/// Distances between neighbours of a bias or mask over scores `[batch, head, row, key]`; 0 where a dimension is broadcast.
/// In elements; for bit masks in 32-bit words, except `key`, which is 1 or 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ScoreLayout {
    /// Of the first element.
    pub offset: u64,
    /// From a sequence to the next.
    pub batch: u64,
    /// From a query head to the next.
    pub head: u64,
    /// From a query row to the next.
    pub row: u64,
    /// From a key to the next.
    pub key: u64,
}

impl ScoreLayout {
    /// A contiguous tensor of `shape` (one to four dimensions, each 1 or that of the scores) aligned at the right, as in
    /// NumPy, against scores `[batch, heads, q_len, kv_len]`; `None` if it does not broadcast.
    ///
    /// ```
    /// use wgpu_attention::ScoreLayout;
    /// let layout = ScoreLayout::broadcast(&[8, 1, 100], [2, 8, 50, 100]).unwrap();
    /// assert_eq!(layout, ScoreLayout { offset: 0, batch: 0, head: 100, row: 0, key: 1 });
    /// assert_eq!(ScoreLayout::broadcast(&[3, 100], [2, 8, 50, 100]), None);
    /// ```
    pub fn broadcast(shape: &[u32], scores: [u32; 4]) -> Option<Self> {
        Self::strides(shape, scores, u64::from)
    }

    /// The same for a bit mask, whose rows of keys start at whole words.
    pub fn broadcast_bits(shape: &[u32], scores: [u32; 4]) -> Option<Self> {
        Self::strides(shape, scores, |keys| u64::from(keys.div_ceil(32)))
    }

    /// That of sequence `b` alone.
    pub(crate) fn of_sequence(self, b: usize) -> Self {
        let offset = self.offset.saturating_add((b as u64).saturating_mul(self.batch));
        ScoreLayout { offset, batch: 0, ..self }
    }

    fn strides(shape: &[u32], scores: [u32; 4], row_len: impl Fn(u32) -> u64) -> Option<Self> {
        if shape.len() > 4 {
            return None;
        }
        let mut full = [1; 4];
        full[4 - shape.len()..].copy_from_slice(shape);
        if full.iter().zip(scores).any(|(have, want)| *have != 1 && *have != want) {
            return None;
        }
        let stride = |dim: usize, distance: u64| if full[dim] == 1 { 0 } else { distance };
        let row = row_len(full[3]);
        let head = row * u64::from(full[2]); // two u32 fit
        let batch = head.saturating_mul(full[1].into());
        Some(ScoreLayout {
            offset: 0,
            batch: stride(0, batch),
            head: stride(1, head),
            row: stride(2, row),
            key: stride(3, 1),
        })
    }
}

/// A caller's range as a binding of just what is used, in whole vec4s where the buffer reaches so far.
pub(crate) fn bind_view<'a>(
    what: &str,
    view: Option<View<'a>>,
    reach: u64,
    limits: &wgpu::Limits,
) -> Result<Option<wgpu::BufferBinding<'a>>> {
    let Some(View { buffer, offset }) = view else { return Ok(None) };
    if !buffer.usage().contains(wgpu::BufferUsages::STORAGE) {
        return Err(Error::shape(what, "a buffer with usage STORAGE", format!("{:?}", buffer.usage())));
    }
    let alignment = limits.min_storage_buffer_offset_alignment;
    if !offset.is_multiple_of(alignment.into()) {
        let expected = format!("an offset that is a multiple of {alignment} bytes (Layout::offset is finer)");
        return Err(Error::shape(what, expected, offset));
    }
    let room = buffer.size().saturating_sub(offset) / 4 * 4;
    // A binding has at least one element of its array, a vec4<f32> at most, even where none is read.
    let need = if reach == 0 { 16 } else { reach.next_multiple_of(4) };
    if need > room {
        let given = format!("{room} from byte {offset} on");
        return Err(Error::shape(what, format!("at least {need} bytes (whole 32-bit words)"), given));
    }
    let size = need.next_multiple_of(16).min(room).min((limits.max_storage_buffer_binding_size / 4 * 4).max(need));
    Ok(Some(wgpu::BufferBinding { buffer, offset, size: wgpu::BufferSize::new(size) }))
}

/// Outputs lie in other buffers than inputs, as WebGPU demands, whatever the ranges.
pub(crate) fn check_input(what: &str, input: View, outputs: &[View]) -> Result<()> {
    match outputs.iter().any(|output| output.buffer == input.buffer) {
        true => Err(Error::shape(what, "a buffer other than the outputs' (WebGPU demands it)", "the same buffer")),
        false => Ok(()),
    }
}

/// Two outputs, each with the bytes it reaches, may share a buffer but no byte of it.
pub(crate) fn check_apart(what: &str, (a, a_reach): (View, u64), (b, b_reach): (View, u64)) -> Result<()> {
    let end = |view: View, reach: u64| view.offset.saturating_add(reach.next_multiple_of(16));
    match a.buffer == b.buffer && a.offset < end(b, b_reach) && b.offset < end(a, a_reach) {
        true => Err(Error::shape(what, "a range apart from O's", "one that overlaps it")),
        false => Ok(()),
    }
}

/// Bytes that `[batch, len, heads, dim]` elements reach in a buffer, if a binding and offsets of 32 bits carry them.
pub(crate) fn reach_of(
    what: &str,
    layout: &Layout,
    [batch, len, heads, dim]: [u32; 4],
    dtype: DType,
    limits: &wgpu::Limits,
) -> Result<u64> {
    let far = |count: u32, stride: u64| u64::from(count.saturating_sub(1)).saturating_mul(stride);
    let elements = match batch.min(len) {
        0 => 0,
        _ => [far(batch, layout.batch), far(len, layout.seq), far(heads, layout.head), dim.into()]
            .into_iter()
            .fold(layout.offset, u64::saturating_add),
    };
    bytes_of(what, elements, dtype, limits)
}

/// Bytes of so many elements, if a binding and offsets of 32 bits carry them.
pub(crate) fn bytes_of(what: &str, elements: u64, dtype: DType, limits: &wgpu::Limits) -> Result<u64> {
    let most = limits.max_storage_buffer_binding_size.min(u64::from(u32::MAX) * dtype.size());
    match elements.saturating_mul(dtype.size()) {
        bytes if bytes > most => Err(Error::limit(format!("bytes of {what}"), most, bytes, "split the work")),
        bytes => Ok(bytes),
    }
}

/// Refuses (stride, count) pairs under which two runs of `extent` elements overlap.
pub(crate) fn check_strides(what: &str, dims: &mut Vec<(u64, u64)>, mut extent: u64) -> Result<()> {
    if dims.iter().any(|(_, count)| *count == 0) {
        return Ok(()); // nothing is written
    }
    dims.retain(|(_, count)| *count > 1);
    dims.sort_unstable();
    for (stride, count) in dims {
        if *stride < extent {
            let expected = format!("strides under which no two elements coincide (here at least {extent})");
            return Err(Error::shape(what, expected, stride));
        }
        extent = stride.saturating_mul(*count - 1).saturating_add(extent);
    }
    Ok(())
}
