/* The loops of thinwire/rules/_kernels.py in C, for machines without numba. Every function gives the same bytes as its
   namesake there; tests compare them. Compile without contraction of products and sums (-ffp-contract=off). */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 256

static uint32_t bits_of(float x) { uint32_t b; memcpy(&b, &x, 4); return b; }
static float from_bits(uint32_t b) { float x; memcpy(&x, &b, 4); return x; }
static float with_sign(float m, float d) { return from_bits(bits_of(m) | (bits_of(d) & 0x80000000u)); }
static float negated(float m, uint32_t code) { return from_bits(bits_of(m) ^ (code << 31)); }
static float widened(uint32_t half) { return from_bits(half << 16); }
static uint32_t half_word(float m) { uint32_t b = bits_of(m); return (b + 0x7FFFu + ((b >> 16) & 1u)) >> 16; }
static float *home_of(float *work, int keep, int64_t b) {
    float *home = keep ? work + b * BLOCK : work;
    if (!keep) memset(home, 0, BLOCK * sizeof(float));
    return home;
}
static void put(uint32_t word, uint8_t *row) { memcpy(row, &word, 4); }
static uint32_t take(const uint8_t *row) { uint32_t word; memcpy(&word, row, 4); return word; }

static float scale_of(float *home, const float *block, float levels, uint8_t *row, float *inverse) {
    int32_t top = 0;
    for (int k = 0; k < BLOCK; k++) {
        home[k] += block[k];
        int32_t magnitude = (int32_t)(bits_of(home[k]) & 0x7FFFFFFFu);
        if (magnitude > top) top = magnitude;
    }
    float peak = from_bits((uint32_t)top), scale = peak / levels, sent = scale;
    *inverse = 0.0f;
    if (top >= 0x7E800000) { memset(home, 0, BLOCK * sizeof(float)); sent = NAN; scale = 0.0f; }
    else if (scale < 0x1p-126f) { sent = scale = 0.0f; }
    else *inverse = levels / peak;
    put(isnan(sent) ? 0x7FC00000u : bits_of(sent), row);
    return scale;
}
static int32_t quantised(float *d, float scale, float inverse) {
    float q = rintf(*d * inverse);
    *d = *d - q * scale;
    return (int32_t)q;
}
void encode_int8(const float *values, float *work, int keep, uint8_t *out, int64_t blocks, int64_t real) {
    for (int64_t b = 0; b < blocks; b++) {
        float inverse, *home = home_of(work, keep, b); uint8_t *row = out + b * 260;
        float scale = scale_of(home, values + b * BLOCK, 127.0f, row, &inverse);
        for (int k = 0; k < 256; k++) row[4 + k] = (uint8_t)(quantised(home + k, scale, inverse) + 128);
    }
}
void encode_int4(const float *values, float *work, int keep, uint8_t *out, int64_t blocks, int64_t real) {
    for (int64_t b = 0; b < blocks; b++) {
        float inverse, *home = home_of(work, keep, b); uint8_t *row = out + b * 132;
        float scale = scale_of(home, values + b * BLOCK, 7.0f, row, &inverse);
        for (int k = 0; k < 128; k++) {
            int32_t low = quantised(home + k, scale, inverse) + 8, high = quantised(home + k + 128, scale, inverse) + 8;
            row[4 + k] = (uint8_t)(low | high << 4);
        }
    }
}
static float folded(float *s) {
    for (int k = 0; k < 16; k++) s[k] = (s[k] + s[k + 32]) + (s[k + 16] + s[k + 48]);
    for (int k = 0; k < 4; k++) s[k] = (s[k] + s[k + 8]) + (s[k + 4] + s[k + 12]);
    return (s[0] + s[2]) + (s[1] + s[3]);
}
static float gathered(float *home, const float *block) {
    float s[64];
    for (int k = 0; k < BLOCK; k++) home[k] += block[k];
    for (int k = 0; k < 64; k++) s[k] = (fabsf(home[k]) + fabsf(home[k + 64])) + (fabsf(home[k + 128]) + fabsf(home[k + 192]));
    return folded(s);
}
void encode_sign1(const float *values, float *work, int keep, uint8_t *out, int64_t blocks, int64_t real) {
    for (int64_t b = 0; b < blocks; b++) {
        float *home = home_of(work, keep, b); uint8_t *row = out + b * 36;
        float total = gathered(home, values + b * BLOCK), mean = total / (float)real;
        uint32_t sent = bits_of(mean);
        if (!(total < 0x1p126f)) { memset(home, 0, BLOCK * sizeof(float)); sent = 0x7FC00000u; mean = 0.0f; }
        else if (mean < 0x1p-126f) { sent = 0; mean = 0.0f; }
        put(sent, row);
        memset(row + 4, 0, 32);
        for (int part = 0; part < 8; part++)
            for (int k = 0; k < 32; k++) {
                float *d = home + 32 * part + k;
                uint32_t negative = bits_of(*d) >> 31;
                *d -= with_sign(mean, *d);
                row[4 + k] |= (uint8_t)(negative << part);
            }
    }
}
static float past(float d, float split) { float m = fabsf(d); return m > split ? m : 0.0f; }
void encode_sign2(const float *values, float *work, int keep, uint8_t *out, int64_t blocks, int64_t real) {
    for (int64_t b = 0; b < blocks; b++) {
        float s[64], *home = home_of(work, keep, b); uint8_t *row = out + b * 68;
        float total = gathered(home, values + b * BLOCK), mean = total / (float)real, split = mean * 1.23f;
        int32_t count = 0;
        for (int k = 0; k < 64; k++)
            s[k] = (past(home[k], split) + past(home[k + 64], split)) + (past(home[k + 128], split) + past(home[k + 192], split));
        for (int k = 0; k < BLOCK; k++) count += fabsf(home[k]) > split;
        float high = folded(s), rest = total - high > 0.0f ? total - high : 0.0f;
        float low = rest / (float)(real - count > 1 ? real - count : 1);
        high = high / (float)(count > 1 ? count : 1);
        uint32_t word = half_word(low) | half_word(high) << 16;
        if (!(total < 0x1p126f)) { memset(home, 0, BLOCK * sizeof(float)); word = 0x7FC07FC0u; low = high = 0.0f; }
        else if (mean < 0x1p-126f) { word = 0; low = high = 0.0f; }
        else { low = widened(word & 0xFFFFu); high = widened(word >> 16); }
        put(word, row);
        memset(row + 4, 0, 64);
        for (int part = 0; part < 4; part++)
            for (int k = 0; k < 64; k++) {
                float *d = home + 64 * part + k;
                uint32_t large = fabsf(*d) > split, negative = bits_of(*d) >> 31;
                *d -= with_sign(large ? high : low, *d);
                row[4 + k] |= (uint8_t)((negative | large << 1) << (2 * part));
            }
    }
}
void encode_bfloat16(const float *values, float *work, int keep, uint8_t *out, int64_t blocks, int64_t real) {
    uint16_t *words = (uint16_t *)out;
    for (int64_t b = 0; b < blocks; b++) {
        float *home = home_of(work, keep, b);
        for (int k = 0; k < BLOCK; k++) {
            float d = home[k] + values[b * BLOCK + k];
            uint32_t bits = bits_of(d), magnitude = bits & 0x7FFFFFFFu;
            uint32_t rounded = (magnitude + 0x7FFFu + ((bits >> 16) & 1u)) & 0xFFFF0000u;
            if (magnitude > 0x7F800000u) rounded = 0x7FC00000u;
            uint32_t word = rounded | (bits & 0x80000000u);
            home[k] = rounded < 0x7F800000u ? d - from_bits(word) : 0.0f;
            words[b * BLOCK + k] = (uint16_t)(word >> 16);
        }
    }
}
static float *fresh_of(float *total, int fresh, int64_t b) {
    float *block = total + b * BLOCK;
    if (fresh) memset(block, 0, BLOCK * sizeof(float));
    return block;
}
void accumulate_int8(const uint8_t *packed, float weight, int fresh, float *total, int64_t blocks) {
    for (int64_t b = 0; b < blocks; b++) {
        const uint8_t *row = packed + b * 260; float *block = fresh_of(total, fresh, b), scale = weight * from_bits(take(row));
        for (int k = 0; k < 256; k++) block[k] += scale * ((float)row[4 + k] - 128.0f);
    }
}
void accumulate_int4(const uint8_t *packed, float weight, int fresh, float *total, int64_t blocks) {
    for (int64_t b = 0; b < blocks; b++) {
        const uint8_t *row = packed + b * 132; float *block = fresh_of(total, fresh, b), scale = weight * from_bits(take(row));
        for (int k = 0; k < 128; k++) {
            block[k] += scale * ((float)(row[4 + k] & 15) - 8.0f);
            block[k + 128] += scale * ((float)(row[4 + k] >> 4) - 8.0f);
        }
    }
}
void accumulate_sign1(const uint8_t *packed, float weight, int fresh, float *total, int64_t blocks) {
    for (int64_t b = 0; b < blocks; b++) {
        const uint8_t *row = packed + b * 36; float *block = fresh_of(total, fresh, b), scale = weight * from_bits(take(row));
        for (int part = 0; part < 8; part++)
            for (int k = 0; k < 32; k++) block[32 * part + k] += negated(scale, (uint32_t)row[4 + k] >> part);
    }
}
void accumulate_sign2(const uint8_t *packed, float weight, int fresh, float *total, int64_t blocks) {
    for (int64_t b = 0; b < blocks; b++) {
        const uint8_t *row = packed + b * 68; float *block = fresh_of(total, fresh, b); uint32_t word = take(row);
        float low = weight * widened(word & 0xFFFFu), high = weight * widened(word >> 16);
        for (int part = 0; part < 4; part++)
            for (int k = 0; k < 64; k++) {
                uint32_t code = (uint32_t)row[4 + k] >> (2 * part);
                block[64 * part + k] += negated(code & 2u ? high : low, code);
            }
    }
}
void accumulate_bfloat16(const uint8_t *packed, float weight, int fresh, float *total, int64_t blocks) {
    const uint16_t *words = (const uint16_t *)packed;
    for (int64_t b = 0; b < blocks; b++) {
        float *block = fresh_of(total, fresh, b);
        for (int k = 0; k < BLOCK; k++) block[k] += weight * widened(words[b * BLOCK + k]);
    }
}
