//! Parts of the kernel that may be modules. A request to a module that is not loaded would load
//! the module.

use std::path::Path;

/// Whether this module is loaded or built into the kernel.
pub fn is_there(module: &str) -> bool {
    Path::new("/sys/module").join(module).exists() || is_builtin(module)
}

/// Whether this part is built into the kernel. Also true if the kernel has no list of modules:
/// then a request can load none.
pub fn is_builtin(module: &str) -> bool {
    let release = rustix::system::uname();
    let builtin = Path::new("/lib/modules").join(release.release().to_string_lossy().as_ref()).join("modules.builtin");
    std::fs::read_to_string(builtin).map_or(true, |list| list.contains(&format!("/{module}.ko")))
}
