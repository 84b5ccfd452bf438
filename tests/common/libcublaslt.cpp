// A stand-in for cuBLASLt whose memory is the host's and whose streams do at once what they are given. Sums are in double. It checks what C cannot: sizes of attributes, that layouts
// fit the product, that addresses are aligned as they were said to be, that working memory is there (it writes to all that it asked for), and that what is given back was taken.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <set>

namespace {
std::set<void*> live;
template <class T> T* take() {
    T* made = new T();
    live.insert(made);
    return made;
}
template <class T> int give(void* p) {
    if (live.erase(p) == 0) return 7;
    delete (T*)p;
    return 0;
}
struct Library { int one; };
struct Product { int compute, scale, left = 0, right = 0, epilogue = 1; const void* bias = nullptr; };
struct Layout { int type; uint64_t rows, columns; int64_t pitch; int batch = 1; int64_t step = 0; };
struct Preference { uint64_t workspace = 0; uint32_t reductions = 7, aligned[4] = {256, 256, 256, 256}; };
// Which algorithm, and what it may take for granted.
struct Algorithm { uint64_t name, aligned[4], rest[3]; };
struct Found { Algorithm algorithm; size_t workspace; int status; float waves; int reserved[4]; };
static_assert(sizeof(Algorithm) == 64 && sizeof(Found) == 96, "as in the library's header");
const uint64_t NAME = 0x5eed;
const size_t NEEDS = 4096;
int64_t calls = 0;
const void* last_stream = nullptr;

float bits(uint32_t b) { float f; std::memcpy(&f, &b, 4); return f; }
double load(const void* p, int type, int64_t i) {
    if (type == 1) return ((const double*)p)[i];
    if (type == 0) return ((const float*)p)[i];
    if (type == 14) return bits(uint32_t(((const uint16_t*)p)[i]) << 16);
    return double(((const _Float16*)p)[i]);
}
void store(void* p, int type, int64_t i, double value) {
    if (type == 1) { ((double*)p)[i] = value; return; }
    if (type == 0) { ((float*)p)[i] = float(value); return; }
    if (type == 2) { ((_Float16*)p)[i] = _Float16(float(value)); return; }
    float f = float(value);
    uint32_t b;
    std::memcpy(&b, &f, 4);
    ((uint16_t*)p)[i] = uint16_t((b + 0x7fff + (b >> 16 & 1)) >> 16);
}
// What the library refuses before it runs.
int wrong(const Product* d, const Layout* x, const Layout* y, const Layout* c, const Layout* r) {
    if (!live.count((void*)d) || !live.count((void*)x) || !live.count((void*)y) || !live.count((void*)r)) return 7;
    uint64_t p = d->left ? x->columns : x->rows, k = d->left ? x->rows : x->columns;
    uint64_t depth = d->right ? y->columns : y->rows, q = d->right ? y->rows : y->columns;
    if (p != r->rows || q != r->columns || k != depth || std::memcmp(c, r, sizeof *c) != 0) return 7;
    if (x->batch != r->batch || y->batch != r->batch || x->type != y->type) return 7;
    bool half = x->type == 2 || x->type == 14, sums = d->compute == (x->type == 1 ? 70 : 68) && d->scale == (x->type == 1 ? 1 : 0);
    if (!sums || !(r->type == x->type || (half && r->type == 0))) return 15;
    return (d->epilogue & 4) && !d->bias ? 7 : 0;
}
template <class T> int put(T* to, const void* from, size_t bytes) {
    if (bytes != sizeof(T)) return 7;
    std::memcpy(to, from, bytes);
    return 0;
}
}

#define API extern "C" __attribute__((visibility("default")))
API int stand_in_live_lt() { return int(live.size()); }
API int stand_in_calls() { return int(calls); }
API int stand_in_stream_is(const void* stream) { return last_stream == stream; }
API int cublasLtCreate(void** h) { *h = take<Library>(); return 0; }
API int cublasLtDestroy(void* h) { return give<Library>(h); }
API int cublasLtGetProperty(int which, int* value) { *value = which == 0 ? 12 : which == 1 ? 9 : 1; return which < 3 ? 0 : 7; }
API int cublasLtMatmulDescCreate(void** d, int compute, int scale) { Product* p = take<Product>(); p->compute = compute, p->scale = scale, *d = p; return 0; }
API int cublasLtMatmulDescDestroy(void* d) { return give<Product>(d); }
API int cublasLtMatmulDescSetAttribute(void* d, int which, const void* from, size_t bytes) {
    Product* p = (Product*)d;
    if (!live.count(d)) return 7;
    return which == 3 ? put(&p->left, from, bytes) : which == 4 ? put(&p->right, from, bytes) : which == 7 ? put(&p->epilogue, from, bytes) : which == 8 ? put(&p->bias, from, bytes) : 7;
}
API int cublasLtMatrixLayoutCreate(void** l, int type, uint64_t rows, uint64_t columns, int64_t pitch) {
    if (type != 0 && type != 1 && type != 2 && type != 14) return 15;
    if (rows == 0 || columns == 0 || pitch < int64_t(rows)) return 7;
    Layout* made = take<Layout>();
    made->type = type, made->rows = rows, made->columns = columns, made->pitch = pitch, *l = made;
    return 0;
}
API int cublasLtMatrixLayoutDestroy(void* l) { return give<Layout>(l); }
API int cublasLtMatrixLayoutSetAttribute(void* l, int which, const void* from, size_t bytes) {
    Layout* to = (Layout*)l;
    if (!live.count(l)) return 7;
    return which == 5 ? put(&to->batch, from, bytes) : which == 6 ? put(&to->step, from, bytes) : 7;
}
API int cublasLtMatmulPreferenceCreate(void** p) { *p = take<Preference>(); return 0; }
API int cublasLtMatmulPreferenceDestroy(void* p) { return give<Preference>(p); }
API int cublasLtMatmulPreferenceSetAttribute(void* p, int which, const void* from, size_t bytes) {
    Preference* to = (Preference*)p;
    if (!live.count(p)) return 7;
    if (which >= 5 && which <= 8) return put(&to->aligned[which - 5], from, bytes);
    return which == 1 ? put(&to->workspace, from, bytes) : which == 3 ? put(&to->reductions, from, bytes) : 7;
}
API int cublasLtMatmulAlgoGetHeuristic(void* h, const Product* d, const Layout* x, const Layout* y, const Layout* c, const Layout* r, const Preference* p, int asked, Found* found, int* count) {
    *count = 0;
    if (!live.count(h) || !live.count((void*)p) || asked != 1) return 7;
    if (int status = wrong(d, x, y, c, r)) return status;
    if (p->reductions & 1 || p->workspace < NEEDS) return 15;
    *found = Found{};
    found->algorithm.name = NAME, found->workspace = NEEDS, *count = 1;
    for (int i = 0; i < 4; i++) found->algorithm.aligned[i] = p->aligned[i];
    return 0;
}
API int cublasLtMatmul(void* h, const Product* d, const void* alpha, const char* a, const Layout* x, const char* b, const Layout* y, const void* beta, const char* c, const Layout* lc, char* r,
                       const Layout* lr, const Algorithm* algorithm, void* workspace, size_t bytes, void* stream) {
    if (!live.count(h) || algorithm->name != NAME) return 7;
    if (int status = wrong(d, x, y, lc, lr)) return status;
    uint64_t places[4] = {uint64_t(a), uint64_t(b), uint64_t(c), uint64_t(r)};
    for (int i = 0; i < 4; i++)
        if (places[i] % algorithm->aligned[i]) return 13;
    if (bytes < NEEDS || !workspace || uint64_t(workspace) % 256) return 7;
    std::memset(workspace, 0xcc, NEEDS);
    double one = load(alpha, d->scale, 0), add = load(beta, d->scale, 0);
    uint64_t p = lr->rows, q = lr->columns, k = d->left ? x->rows : x->columns;
    for (int z = 0; z < lr->batch; z++) {
        for (uint64_t j = 0; j < q; j++) {
            for (uint64_t i = 0; i < p; i++) {
                double sum = 0;
                for (uint64_t t = 0; t < k; t++) {
                    int64_t at = d->left ? t + i * x->pitch : i + t * x->pitch, bt = d->right ? j + t * y->pitch : t + j * y->pitch;
                    sum += load(a, x->type, z * x->step + at) * load(b, y->type, z * y->step + bt);
                }
                int64_t at = z * lr->step + i + j * lr->pitch;
                sum = one * sum + (add != 0 ? add * load(c, lr->type, at) : 0);
                if (d->epilogue & 4) sum += load(d->bias, lr->type, i);
                if (d->epilogue & 2) sum = sum > 0 ? sum : 0;
                if (d->epilogue & 32) sum = 0.5 * sum * (1 + std::tanh(0.79788456080286535588 * (sum + 0.044715 * sum * sum * sum)));
                store(r, lr->type, at, sum);
            }
        }
    }
    calls++, last_stream = stream;
    return 0;
}
