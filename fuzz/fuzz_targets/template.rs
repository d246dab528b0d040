#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    comoe_fuzz::template(data);
});
