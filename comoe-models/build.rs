//! With feature `cuda`: compiles `kernels/` into one fatbin with machine code for every GPU generation since Ampere,
//! and PTX for those to come. No JIT at start, and nothing to link.

use std::env;
use std::path::PathBuf;
use std::process::Command;

const UNIT: &str = "kernels/comoe_models.cu";
const ARCHS: [&str; 6] = ["80", "86", "89", "90", "100", "120"];
const ADVICE: &str = "feature `cuda` needs nvcc of CUDA 12.8 or later: install CUDA, or in a checkout of CoMoE run \
                      `eval \"$(scripts/cuda-toolkit.sh)\"`, which needs no GPU, and build again";

fn main() {
    println!("cargo::rerun-if-changed=kernels");
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    let candidates = ["CUDA_HOME", "CUDA_PATH"].map(|name| {
        println!("cargo::rerun-if-env-changed={name}");
        env::var_os(name).map(|home| PathBuf::from(home).join("bin/nvcc"))
    });
    let nvcc = candidates.into_iter().flatten().find(|path| path.is_file()).unwrap_or("nvcc".into());
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("kernels.fatbin");

    let mut command = Command::new(&nvcc);
    // No contraction behind our back: kernels say where they fuse, so every instantiation gives the same bits.
    command.args(["--fatbin", "-std=c++17", "-O3", "-fmad=false", "--Werror=all-warnings", UNIT]);
    command.args(["--threads", &env::var("NUM_JOBS").unwrap_or("1".into())]);
    // While working on kernels, one generation is enough: COMOE_CUDA_ARCHS=90.
    println!("cargo::rerun-if-env-changed=COMOE_CUDA_ARCHS");
    let archs = env::var("COMOE_CUDA_ARCHS").unwrap_or(ARCHS.join(","));
    command.args(archs.split(',').map(|arch| format!("-gencode=arch=compute_{arch},code=sm_{arch}")));
    command.args(["-gencode=arch=compute_120,code=compute_120", "-o"]).arg(&out);
    match command.status() {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("{} {UNIT}: {status}; {ADVICE}", nvcc.display()),
        Err(error) => panic!("{}: {error}; {ADVICE}", nvcc.display()),
    }
}
