//! CUDA C++ to PTX by NVRTC, with the options that CubeCL's CUDA runtime gives it.

use libloading::{Library, Symbol};
use std::ffi::{CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr;

type Program = *mut c_void;

pub struct Nvrtc {
    library: Library,
    /// NVRTC asks for it by name, which finds it once it is open.
    _builtins: Option<Library>,
    includes: Vec<String>,
}

impl Nvrtc {
    /// Opens the library; `includes` are folders separated by `:`.
    pub fn open(path: &str, includes: &str) -> Self {
        let folder = Path::new(path).parent().unwrap_or(Path::new("."));
        let builtins = std::fs::read_dir(folder).ok().and_then(|mut files| {
            files.find_map(|file| {
                let file = file.ok()?.path();
                let name = file.file_name()?.to_str()?;
                name.starts_with("libnvrtc-builtins.so").then_some(file)
            })
        });
        // SAFETY: NVRTC's initialisers have no preconditions.
        let library = unsafe { Library::new(path) }
            .unwrap_or_else(|error| panic!("NVRTC_LIBRARY={path} does not open: {error}"));
        Self {
            library,
            // SAFETY: as above.
            _builtins: builtins.and_then(|file| unsafe { Library::new(file) }.ok()),
            includes: includes.split(':').map(str::to_string).collect(),
        }
    }

    /// PTX of `source`, or the compiler's log.
    pub fn compile(&self, source: &str, version: u32) -> Result<String, String> {
        let suffix = if version >= 90 { "a" } else { "" };
        let mut options = vec![
            format!("--gpu-architecture=sm_{version}{suffix}"),
            "-lineinfo".to_string(),
        ];
        options.extend(
            self.includes
                .iter()
                .map(|path| format!("--include-path={path}")),
        );
        let options: Vec<CString> = options.into_iter().map(c_string).collect();
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let source = c_string(source.to_string());
        let mut program: Program = ptr::null_mut();
        // SAFETY: the signatures are those of nvrtc.h, every string outlives the calls, and each
        // text is read into a buffer of the size that NVRTC gave for it.
        unsafe {
            let create: Symbol<
                unsafe extern "C" fn(
                    *mut Program,
                    *const c_char,
                    *const c_char,
                    c_int,
                    *const *const c_char,
                    *const *const c_char,
                ) -> c_int,
            > = self.symbol(b"nvrtcCreateProgram\0");
            let compile: Symbol<
                unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
            > = self.symbol(b"nvrtcCompileProgram\0");
            let destroy: Symbol<unsafe extern "C" fn(*mut Program) -> c_int> =
                self.symbol(b"nvrtcDestroyProgram\0");
            let created = create(
                &mut program,
                source.as_ptr(),
                ptr::null(),
                0,
                ptr::null(),
                ptr::null(),
            );
            if created != 0 {
                return Err(format!("nvrtcCreateProgram returned {created}"));
            }
            let status = compile(program, pointers.len() as c_int, pointers.as_ptr());
            let text = if status == 0 {
                self.text(program, b"nvrtcGetPTXSize\0", b"nvrtcGetPTX\0")
            } else {
                self.text(
                    program,
                    b"nvrtcGetProgramLogSize\0",
                    b"nvrtcGetProgramLog\0",
                )
            };
            destroy(&mut program);
            if status == 0 { Ok(text) } else { Err(text) }
        }
    }

    /// # Safety
    /// `T` is the symbol's type.
    unsafe fn symbol<T>(&self, name: &[u8]) -> Symbol<'_, T> {
        // SAFETY: the caller's.
        unsafe { self.library.get(name) }.expect("a symbol of NVRTC")
    }

    /// # Safety
    /// `program` is alive, and the two names are a pair of nvrtc.h's getters.
    unsafe fn text(&self, program: Program, size: &[u8], get: &[u8]) -> String {
        // SAFETY: the caller's; the buffer has the size that NVRTC gives.
        unsafe {
            let size: Symbol<unsafe extern "C" fn(Program, *mut usize) -> c_int> =
                self.symbol(size);
            let get: Symbol<unsafe extern "C" fn(Program, *mut c_char) -> c_int> = self.symbol(get);
            let mut length = 0usize;
            size(program, &mut length);
            let mut bytes = vec![0u8; length];
            get(program, bytes.as_mut_ptr().cast());
            bytes.truncate(bytes.iter().position(|&byte| byte == 0).unwrap_or(length));
            String::from_utf8_lossy(&bytes).into_owned()
        }
    }
}

fn c_string(text: String) -> CString {
    CString::new(text).expect("no NUL in source or options")
}
