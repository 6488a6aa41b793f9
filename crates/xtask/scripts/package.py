"""`cargo xtask package`: what crates.io would get, and whether a crate outside the workspace can use
it: its files come from the packages, and it runs the examples of their READMEs."""

import json, os, re, shutil, subprocess, sys, tarfile, time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# The categories of crates.io that the workspace uses; crates.io drops others. All of them:
# src/boot/categories.toml of rust-lang/crates.io.
CATEGORIES = {"api-bindings", "computer-vision", "development-tools::testing", "emulators",
              "hardware-support", "mathematics", "multimedia::images", "science", "text-processing"}
# Folders that a package may contain: sources of Rust, of kernels, and headers for kernels.
FOLDERS = ("src/", "kernels/", "include/")
LICENSES = ("LICENSE-APACHE", "LICENSE-MIT")
OWN_FILES = ("README.md", *LICENSES)
CARGO_FILES = ("Cargo.toml", "Cargo.toml.orig", "Cargo.lock", ".cargo_vcs_info.json")
# A package of more compressed bytes contains something that does not belong there; crates.io takes
# 10 MiB.
MOST_BYTES = 1 << 20
# Features of packages that the reader turns on.
READER_FEATURES = {"burn-ascend": '"ascend-sim"'}
# What the reader depends on besides: with these features its external crates are the ones that the
# workspace's tests were compiled with, and are not compiled again. Where one is missing, the check
# takes minutes longer; `cargo tree -f "{p} {f}"` of both tells which. The profile too.
READER = """
burn = { version = "0.22", default-features = false, features = [
    "std", "autodiff", "flex", "optim", "rayon", "simd",
] }
num-traits = "0.2"
regex-syntax = "0.8"
rustix = { version = "1", features = ["termios"] }

[profile.dev]
debug = "line-tables-only"
incremental = false
[profile.dev.package."*"]
debug = false
"""


def cargo(*arguments, folder=ROOT, **options):
    return subprocess.run(["cargo", *arguments], cwd=folder, check=True, **options)


def manifest_faults(package):
    """What crates.io would refuse or drop in a manifest, and what readers would miss
    (https://doc.rust-lang.org/cargo/reference/manifest.html)."""
    keys = ("description", "license", "readme", "rust_version")
    yield from (f"no {key}" for key in keys if not package[key])
    for key in ("keywords", "categories"):
        if not 1 <= len(package[key]) <= 5:
            yield f"{len(package[key])} {key}, expected 1 to 5"
    keyword = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+-]{0,19}")
    yield from (f"{w!r} is no keyword" for w in package["keywords"] if not keyword.fullmatch(w))
    yield from (f"{c!r} is no known category" for c in set(package["categories"]) - CATEGORIES)


def file_faults(folder, compressed):
    """Files that are missing in a package, or should not be there."""
    files = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    yield from (f"no {name}" for name in OWN_FILES if name not in files)
    known = OWN_FILES + CARGO_FILES
    foreign = (name for name in sorted(files) if not name.startswith(FOLDERS) and name not in known)
    yield from (f"{name} does not belong there" for name in foreign)
    if compressed > MOST_BYTES:
        yield f"{compressed} bytes, expected at most {MOST_BYTES}"
    for name in files & set(LICENSES):
        if (folder / name).read_bytes() != (ROOT / name).read_bytes():
            yield f"{name} is not the repository's"


def examples(page):
    """The Rust examples of a page, as rustdoc takes them: `# ` hides a line from readers only."""
    for kind, code in re.findall(r"^```rust(,no_run)?\n(.*?)^```$", page, re.S | re.M):
        yield not kind, re.sub(r"^# ", "", code, flags=re.M)


def program(pages):
    """A program of the examples of all pages. The simulator stands for the NPU that one wants."""
    functions, main = "", ""
    found = [(page, *example) for page, text in pages for example in examples(text)]
    for index, (page, runs, code) in enumerate(found):
        simulated = code.replace("Npu::open(0)", "Npu::simulated()")
        end = "" if "Ok::<" in code else "Ok::<(), ()>(())\n"
        functions += f"fn example_{index}() -> Result<(), impl std::fmt::Debug> {{\n{simulated}{end}}}\n"
        if runs or simulated != code:
            main += f'println!("{page}");\nexample_{index}().expect("{page}");\n'
        else:
            main += f"let _ = example_{index};\n"
    return f"{functions}fn main() {{\n{main}}}\n"


def main():
    found = cargo("metadata", "--no-deps", "--offline", "--format-version=1", stdout=subprocess.PIPE)
    metadata = json.loads(found.stdout)
    published = [package for package in metadata["packages"] if package["publish"] is None]
    target = Path(metadata["target_directory"])
    names = [word for package in published for word in ("-p", package["name"])]
    cargo("package", "--quiet", "--offline", "--locked", "--no-verify", "--allow-dirty", *names)

    outside = target / "outside"
    shutil.rmtree(outside, ignore_errors=True)
    reader = outside / "reader"
    (reader / "src").mkdir(parents=True)
    pages = [("README.md", (ROOT / "README.md").read_text())]
    unfit, dependencies, patches = [], "", ""
    for package in published:
        name, version = package["name"], package["version"]
        folder, file = outside / f"{name}-{version}", target / f"package/{name}-{version}.crate"
        with tarfile.open(file) as packed:
            packed.extractall(outside, filter="data")
        faults = [*manifest_faults(package), *file_faults(folder, file.stat().st_size)]
        readme = folder / "README.md"
        pages.append((folder.name, readme.read_text() if readme.exists() else ""))
        if not list(examples(pages[-1][1])):
            faults.append("README.md has no example")
        unfit += [f"{name}: {fault}" for fault in faults]
        features = READER_FEATURES.get(name, "")
        dependencies += f'{name} = {{ version = "={version}", features = [{features}] }}\n'
        patches += f'{name} = {{ path = "../{folder.name}" }}\n'
        print(f"{folder.name}: {-(-file.stat().st_size // 1024)} KiB compressed")
    if unfit:
        sys.exit("not fit for crates.io:\n" + "\n".join(unfit))

    manifest = '[package]\nname = "reader"\nversion = "0.0.0"\nedition = "2024"\n\n[workspace]\n\n'
    manifest += f"[patch.crates-io]\n{patches}\n[dependencies]\n{dependencies}{READER}"
    (reader / "Cargo.toml").write_text(manifest)
    (reader / "src/main.rs").write_text(program(pages))
    shutil.copy(ROOT / "Cargo.lock", reader)
    start = time.monotonic()
    cargo("run", "--offline", "--target-dir", str(target), folder=reader)
    seconds = time.monotonic() - start
    print(f"the READMEs' examples built and ran outside the workspace in {seconds:.0f} s")


# With the variables that cargo sets for xtask it would build other packages again, for minutes.
for variable in [v for v in os.environ if v.startswith(("CARGO_PKG_", "CARGO_MANIFEST_"))]:
    del os.environ[variable]
main()
