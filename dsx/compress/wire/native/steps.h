/* What an outer step does to each element, of one instruction set: included by kernels.c for each,
 * with NAME and TARGET set. The operations are torch's, one after another, each rounded to fp32.
 */

/* buffer = mu * buffer + grad, and in out what is to be subtracted: lr * buffer, or looking ahead
 * lr * (grad + mu * buffer). out may be grad. */
static TARGET void NAME(momentum)(const float *grad, float *restrict buffer, float *out,
                                  int64_t numel, float lr, float mu, int looks_ahead)
{
    if (looks_ahead)
#pragma GCC ivdep
        for (int64_t j = 0; j < numel; j++) {
            float moved = buffer[j] * mu + grad[j];
            buffer[j] = moved;
            out[j] = (grad[j] + moved * mu) * lr;
        }
    else
#pragma GCC ivdep
        for (int64_t j = 0; j < numel; j++) {
            float moved = buffer[j] * mu + grad[j];
            buffer[j] = moved;
            out[j] = moved * lr;
        }
}

/* local = kept * local + taken * anchor */
static TARGET void NAME(blend)(float *restrict local, const float *restrict anchor, int64_t numel,
                               float kept, float taken)
{
    for (int64_t j = 0; j < numel; j++)
        local[j] = local[j] * kept + anchor[j] * taken;
}

/* out = origin - local; what is long goes past the cache, where another thread reads it later. */
static TARGET void NAME(difference)(const float *origin, const float *local, float *out,
                                    int64_t numel)
{
    int64_t j = 0;
#if defined(__x86_64__)
    if (numel >= LONG && (uintptr_t)out % 16 == 0) {
        for (; j + 4 <= numel; j += 4)
            _mm_stream_ps(out + j, _mm_sub_ps(_mm_loadu_ps(origin + j), _mm_loadu_ps(local + j)));
        _mm_sfence();
    }
#endif
    for (; j < numel; j++)
        out[j] = origin[j] - local[j];
}
