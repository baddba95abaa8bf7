/* What the kernels need to know of a format. */
#ifndef DSX_WIRE_FORM_H
#define DSX_WIRE_FORM_H

#include <stdint.h>

/* The formats, in the order of library.py. */
enum { INT8, INT4, E4M3, E2M1, E3M0, TERNARY_FORMAT, THREE_BITS, TWO_BITS, ONE_BIT };

typedef struct { /* the fields are those of library.py, in order */
    int32_t kind;       /* one of the above */
    int32_t group_size; /* 32, 64, 128 or 256 */
    int32_t is_stochastic;
    float top_rank;
    float top_value;
    float largest_scale;
    float levels[4]; /* the positive ones */
    float cuts[3];   /* half-way between them */
} Form;

enum { INTEGERS, SMALL_FLOATS, LEVELS, TERNARY };

typedef struct { /* what a loop is made for: constants in it */
    int grid;
    int parts;      /* codes that share a word */
    int word_bytes; /* one; of 3 bits three */
    int num_bends;  /* of a small float's grid; above 5 ranks are made of the float's bits */
    int mantissa_bits;
    int num_levels;
} Kind;

static const Kind KINDS[] = {
    [INT8] = {INTEGERS, 1, 1, 0, 0, 0},     [INT4] = {INTEGERS, 2, 1, 0, 0, 0},
    [E4M3] = {SMALL_FLOATS, 1, 1, 14, 3, 0}, [E2M1] = {SMALL_FLOATS, 2, 1, 2, 1, 0},
    [E3M0] = {SMALL_FLOATS, 2, 1, 5, 0, 0},  [TERNARY_FORMAT] = {TERNARY, 5, 1, 0, 0, 0},
    [THREE_BITS] = {LEVELS, 8, 3, 0, 0, 4},  [TWO_BITS] = {LEVELS, 4, 1, 0, 0, 2},
    [ONE_BIT] = {LEVELS, 8, 1, 0, 0, 1},
};

typedef struct { /* the words of the noise's hash key, but for the index */
    uint32_t first;
    uint32_t second;
} Key;

#endif
