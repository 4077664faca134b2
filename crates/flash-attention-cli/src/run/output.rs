//! Writes the results of a run: all of them, or no file.

use super::array::Array;
use crate::Outcome;
use safetensors::tensor::TensorView;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use tempfile::Builder;

/// Refuses a path that cannot be written, before time is spent on computing.
pub fn check_path(output: &Path, input: &Path) -> Outcome<()> {
    let directory = directory(output);
    if !directory.is_dir() {
        return Err(format!("{} is not a directory", directory.display()).into());
    }
    if output.is_dir() || output.file_name().is_none() {
        return Err(format!("output {} is a directory", output.display()).into());
    }
    if output.is_symlink() && !output.exists() {
        return Err(format!(
            "output {} is a link to a file that is not there",
            output.display()
        )
        .into());
    }
    if fs::canonicalize(output).is_ok_and(|path| fs::canonicalize(input).is_ok_and(|i| i == path)) {
        return Err(format!("output {} is the input file", output.display()).into());
    }
    Ok(())
}

/// Refuses results with NaN or an infinity in them; an lse of `-inf` belongs to a row that sees nothing.
pub fn check_numbers(arrays: &[Array]) -> Outcome<()> {
    for array in arrays {
        let accepted = |x: f64| x.is_finite() || (array.name == "lse" && x == f64::NEG_INFINITY);
        if let Some(at) = array.values.iter().position(|&x| !accepted(x)) {
            let (name, x, index) = (array.name, array.values[at], array.index(at));
            return Err(format!(
                "tensor {name} comes out as {x} at {index:?}, expected a finite number"
            )
            .into());
        }
    }
    Ok(())
}

/// Writes a safetensors file. It appears under its name only when it is complete.
pub fn write(path: &Path, arrays: &[Array]) -> Outcome<()> {
    let bytes: Vec<Vec<u8>> = arrays.iter().map(Array::bytes).collect();
    let views = arrays.iter().zip(&bytes).map(|(array, bytes)| {
        let view = TensorView::new(array.stored, array.shape.clone(), bytes)?;
        Ok((array.name, view))
    });
    let views = views.collect::<Outcome<Vec<_>>>()?;
    let file = safetensors::serialize(views, None)?;

    // Renaming a file over a device, a pipe or a link would put an end to it.
    let target = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    if target.metadata().is_ok_and(|existing| !existing.is_file()) {
        return Err(format!(
            "output {}: exists and is not a regular file",
            path.display()
        )
        .into());
    }

    let mut builder = Builder::new();
    // A temporary file is private by default; the result should have the permissions of any new file.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let named = |error: &io::Error| format!("output {}: {}", path.display(), reason(error));
    let mut temporary = builder
        .tempfile_in(directory(&target))
        .map_err(|e| named(&e))?;
    temporary.write_all(&file).map_err(|e| named(&e))?;
    temporary.persist(&target).map_err(|e| named(&e.error))?;
    Ok(())
}

/// The system's text, without the name of a temporary file, which means nothing to the user.
fn reason(error: &io::Error) -> String {
    let text = error.to_string();
    match text.split_once(" at path ") {
        Some((reason, _)) => reason.to_string(),
        None => text,
    }
}

fn directory(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
        _ => PathBuf::from("."),
    }
}
