// AMX: tiles of 16 rows, which a thread has to configure, and the system has to allow.
#pragma once

#include "simd_products.h"

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace triolet {

constexpr int PANEL = 16;    // outputs of a panel
constexpr int ROW_PAD = 32;  // two AMX tiles
constexpr int DEPTH_PAD = 32;

#if defined(__AMX_BF16__)
static bool ask_for_amx() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

static bool has_amx() {
    static const bool is_allowed = ask_for_amx();
    return is_allowed;
}

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Multiplies up to 32 rows by 2 panels. Tiles 0-3 hold sums, 4-5 rows, 6-7 weights.
template <bool TWO_ROWS, bool TWO_PANELS>
static void amx_tiles(const bf16 *x, long ldx, const bf16 *w, long stride, long begin, long end,
                      float *out, long ldo, bool is_more) {
    const long bytes = ldo * 4;
    float *low = out + 16 * ldo;
    if (is_more) {
        _tile_loadd(0, out, bytes);
        if (TWO_PANELS) _tile_loadd(1, out + PANEL, bytes);
        if (TWO_ROWS) _tile_loadd(2, low, bytes);
        if (TWO_ROWS && TWO_PANELS) _tile_loadd(3, low + PANEL, bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (long k = begin; k < end; k += DEPTH_PAD) {
        _tile_loadd(4, x + k, ldx * 2);
        _tile_loadd(6, w + k * PANEL, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (TWO_PANELS) {
            _tile_loadd(7, w + stride + k * PANEL, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (TWO_ROWS) {
            _tile_loadd(5, x + 16 * ldx + k, ldx * 2);
            _tile_dpbf16ps(2, 5, 6);
            if (TWO_PANELS) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, out, bytes);
    if (TWO_PANELS) _tile_stored(1, out + PANEL, bytes);
    if (TWO_ROWS) _tile_stored(2, low, bytes);
    if (TWO_ROWS && TWO_PANELS) _tile_stored(3, low + PANEL, bytes);
}

static void amx_block(const bf16 *x, long ldx, long rows, const bf16 *w, long stride, long panels,
                      long begin, long end, float *out, long ldo, bool is_more) {
    for (long n = 0; n < panels; n += 2) {
        const bf16 *own = w + n * stride;
        for (long m = 0; m < rows; m += 32) {
            const bf16 *from = x + m * ldx;
            float *to = out + m * ldo + n * PANEL;
            bool two_rows = rows - m > 16, two_panels = panels - n > 1;
            if (two_rows && two_panels)
                amx_tiles<true, true>(from, ldx, own, stride, begin, end, to, ldo, is_more);
            else if (two_rows)
                amx_tiles<true, false>(from, ldx, own, stride, begin, end, to, ldo, is_more);
            else if (two_panels)
                amx_tiles<false, true>(from, ldx, own, stride, begin, end, to, ldo, is_more);
            else
                amx_tiles<false, false>(from, ldx, own, stride, begin, end, to, ldo, is_more);
        }
    }
}
#else
[[maybe_unused]] static bool has_amx() { return false; }

// Without AMX this is never called.
[[maybe_unused]] static void amx_block(const bf16 *, long, long, const bf16 *, long, long, long, long,
                                       float *, long, bool) {}
#endif

// Configures a thread's AMX tiles for as long as the object lives. Does nothing without AMX.
struct Tiles {
    Tiles() {
#if defined(__AMX_BF16__)
        if (!has_amx()) return;
        TileConfig config;
        _tile_loadconfig(&config);
#endif
    }
    ~Tiles() {
#if defined(__AMX_BF16__)
        if (has_amx()) _tile_release();
#endif
    }
};

}  // namespace triolet
