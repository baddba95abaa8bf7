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
