//! A writer of GGUF files for tests, after llama.cpp's `docs/gguf.md`. Knows nothing of the reader.

use std::path::Path;

/// Name, row-major shape, number of the type, bytes.
type Tensor = (String, Vec<usize>, u32, Vec<u8>);

/// A GGUF file to be.
#[derive(Default, Clone)]
pub(crate) struct Writer {
    entries: Vec<u8>,
    count: u64,
    tensors: Vec<Tensor>,
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

impl Writer {
    pub(crate) fn new(architecture: &str) -> Self {
        Self::default().text("general.architecture", architecture)
    }

    fn entry(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        text(&mut self.entries, key);
        self.entries.extend(kind.to_le_bytes());
        self.entries.extend(value);
        self.count += 1;
        self
    }

    pub(crate) fn text(self, key: &str, value: &str) -> Self {
        let mut bytes = Vec::new();
        text(&mut bytes, value);
        self.entry(key, 8, &bytes)
    }

    pub(crate) fn number(self, key: &str, value: u32) -> Self {
        self.entry(key, 4, &value.to_le_bytes())
    }

    pub(crate) fn float(self, key: &str, value: f32) -> Self {
        self.entry(key, 6, &value.to_le_bytes())
    }

    pub(crate) fn truth(self, key: &str, value: bool) -> Self {
        self.entry(key, 7, &[value.into()])
    }

    fn list(self, key: &str, kind: u32, len: usize, elements: &[u8]) -> Self {
        let mut bytes = kind.to_le_bytes().to_vec();
        bytes.extend((len as u64).to_le_bytes());
        bytes.extend(elements);
        self.entry(key, 9, &bytes)
    }

    pub(crate) fn texts(self, key: &str, values: &[String]) -> Self {
        let mut bytes = Vec::new();
        values.iter().for_each(|v| text(&mut bytes, v));
        self.list(key, 8, values.len(), &bytes)
    }

    pub(crate) fn integers(self, key: &str, values: &[i32]) -> Self {
        self.list(key, 5, values.len(), &values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())
    }

    pub(crate) fn floats(self, key: &str, values: &[f32]) -> Self {
        self.list(key, 6, values.len(), &values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())
    }

    /// A tensor of a row-major shape and a type by its number, as its bytes.
    pub(crate) fn tensor(mut self, name: &str, shape: &[usize], kind: u32, bytes: Vec<u8>) -> Self {
        self.tensors.push((name.to_owned(), shape.to_vec(), kind, bytes));
        self
    }

    /// The data of a tensor.
    pub(crate) fn bytes_of(&self, tensor: usize) -> &[u8] {
        &self.tensors[tensor].3
    }

    /// The same model in several files; the first has the metadata.
    pub(crate) fn split(&self, parts: usize) -> Vec<Self> {
        let each = self.tensors.len().div_ceil(parts);
        (0..parts)
            .map(|n| {
                let tensors = self.tensors.chunks(each).nth(n).unwrap_or_default().to_vec();
                let (entries, count) =
                    if n == 0 { (self.entries.clone(), self.count) } else { (Vec::new(), 0) };
                let part = Self { entries, count, tensors };
                part.number("split.no", n as u32).number("split.count", parts as u32)
            })
            .collect()
    }

    /// The file's bytes.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend(self.count.to_le_bytes());
        out.extend(&self.entries);
        let mut offset = 0u64;
        for (name, shape, kind, bytes) in &self.tensors {
            text(&mut out, name);
            out.extend((shape.len() as u32).to_le_bytes());
            shape.iter().rev().for_each(|d| out.extend((*d as u64).to_le_bytes()));
            out.extend(kind.to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset += (bytes.len() as u64).next_multiple_of(32);
        }
        for (_, _, _, bytes) in &self.tensors {
            out.resize(out.len().next_multiple_of(32), 0);
            out.extend(bytes);
        }
        out
    }

    /// Writes the file.
    pub(crate) fn write(&self, path: &Path) {
        std::fs::write(path, self.bytes()).unwrap();
    }
}
