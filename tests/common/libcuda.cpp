// A stand-in for libcuda and libnccl with one device whose memory is the host's and whose streams do at once what they are given. It checks what C cannot: sizes of structures,
// alignment, and that what is given back was taken. A kernel gets 48 KiB of shared memory, or what was asked for it, and the device has 99 KiB. Whoever is in color 13 of a
// split waits for somebody who never comes.
//
// Kernels that the stand-in for NVRTC made (`libnvrtc.cpp`) run in the CPU shim. Of real machine code it knows two kernels, `dp_clip`, and `dp_tensor`, which writes down a tensor that
// it was given. `STAND_IN_CAPABILITY` is what the device can do, 9 if absent.
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <functional>
#include <map>
#include <new>
#include <set>
#include <string>
#include <vector>

namespace {
std::map<void*, size_t> live;
void* take(size_t bytes) {
    void* p = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    live[p] = bytes;
    return p;
}
int give(void* p) {
    if (live.erase(p) == 0) return 1;
    std::free(p);
    return 0;
}
struct Copy2D {
    size_t fx, fy; int fkind; const void* fhost; uint64_t from; void* farray; size_t fpitch;
    size_t tx, ty; int tkind; void* thost; uint64_t to; void* tarray; size_t tpitch;
    size_t width, height;
};
struct Id { char bytes[128]; };
struct Config { size_t size; unsigned magic, version; int blocking; };
// As in `kernels/src/shim/shim.h`.
struct Memory { char* base; uint64_t bytes; uint64_t* writers; uint32_t (*sectors)[2]; uint64_t read, written; int32_t writable; };
struct Arg { int32_t kind; Memory* memory; uint64_t offset; int64_t integer; const uint64_t* tensor; };
struct Launch { unsigned grid[3]; uint32_t threads, shared; uint64_t seed, number, first_block, blocks; const Arg* args; char* error; };
// A kernel, the shared memory that it may have, and in the shim what it is called by and takes.
struct Function { std::string name; int most; int (*run)(const Launch*); const char* kinds; };
std::map<std::pair<void*, std::string>, Function> functions;
// Libraries of the shim, by module.
std::map<void*, void*> shims;
uint64_t launched = 0;
int asked = 0, context = 0, color_of_split = 0, key_of_split = 0;
void* stuck = nullptr;
// Copies and fills that are captured; whoever captures launches nothing here.
struct Graph { std::vector<std::function<void()>> work; };
Graph* capturing = nullptr;
int queue(std::function<void()> work) {
    if (capturing)
        capturing->work.push_back(work);
    else
        work();
    return 0;
}
size_t size_of(int dtype) { return dtype == 8 ? 8 : dtype == 7 || dtype == 2 ? 4 : dtype == 0 ? 1 : 2; }
}

#define API extern "C" __attribute__((visibility("default")))
API int stand_in_live() { return int(live.size()); }
API int stand_in_color() { return color_of_split; }
API int stand_in_key() { return key_of_split; }
API int cuInit(unsigned) { return 0; }
API int cuDeviceGetCount(int* n) { *n = 1; return 0; }
API int cuDeviceGet(int* d, int) { *d = 5; return 0; }
API int cuDeviceGetAttribute(int* v, int what, int d) {
    const char* capability = std::getenv("STAND_IN_CAPABILITY");
    *v = what == 75 ? (capability ? std::atoi(capability) : 9) : what == 16 ? 4 : what == 13 ? 1000000 : 0;
    return d == 5 ? 0 : 101;
}
API int cuDeviceGetName(char* name, int n, int d) { std::strncpy(name, "a stand-in", n); return d == 5 ? 0 : 101; }
API int cuDriverGetVersion(int* version) { *version = 12040; return 0; }
API int cuDevicePrimaryCtxRetain(void** c, int d) { *c = &context; return d == 5 ? 0 : 101; }
API int cuDevicePrimaryCtxRelease_v2(int d) { return d == 5 ? 0 : 101; }
API int cuCtxSetCurrent(void* c) { return c == &context ? 0 : 201; }
API int cuMemAlloc_v2(uint64_t* p, size_t n) { if (n > size_t(1) << 40) return 2; *p = uint64_t(take(n)); return 0; }
API int cuMemFree_v2(uint64_t p) { return give((void*)p); }
API int cuMemHostAlloc(void** p, size_t n, unsigned) { *p = take(n); return 0; }
API int cuMemFreeHost(void* p) { return give(p); }
API int cuStreamCreate(void** s, unsigned flags) { *s = take(1); return flags == 1 ? 0 : 1; }
API int cuStreamDestroy_v2(void* s) { return give(s); }
API int cuStreamWaitEvent(void* s, void* e, unsigned) { return live.count(s) && live.count(e) ? 0 : 400; }
API int cuStreamQuery(void*) { return asked++ % 2 == 0 ? 600 : 0; }
API int cuEventCreate(void** e, unsigned flags) { *e = take(8); return flags == 2 || flags == 0 ? 0 : 1; }
API int cuEventDestroy_v2(void* e) { return give(e); }
API int cuEventRecord(void* e, void* s) {
    if (!live.count(s) || !live.count(e)) return 400;
    *(double*)e = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
    return 0;
}
API int cuEventElapsedTime(float* milliseconds, void* from, void* to) { *milliseconds = float(*(double*)to - *(double*)from); return live.count(from) && live.count(to) ? 0 : 400; }
API int cuModuleLoadData(void** m, const void* image) {
    if (std::memcmp(image, "\x7f" "ELF", 4) != 0) return 200;
    *m = take(1);
    // What the stand-in for NVRTC makes is the path of a library.
    if (((const char*)image)[4] == '/') {
        void* library = dlopen((const char*)image + 4, RTLD_NOW | RTLD_LOCAL);
        if (!library) return std::fprintf(stderr, "%s\n", dlerror()), 200;
        shims[*m] = library;
    }
    return 0;
}
API int cuModuleUnload(void* m) { shims.erase(m); return give(m); }
API int cuModuleGetFunction(void** f, void* m, const char* name) {
    Function function = {name, 48 * 1024, nullptr, nullptr};
    if (shims.count(m)) {
        function.run = (int (*)(const Launch*))dlsym(shims[m], (std::string(name) + "_run").c_str());
        const char** kinds = (const char**)dlsym(shims[m], (std::string(name) + "_kinds").c_str());
        if (!function.run || !kinds) return 500;
        function.kinds = *kinds;
    }
    *f = &(functions[{m, name}] = function);
    return live.count(m) ? 0 : 400;
}
API int cuFuncSetAttribute(void* f, int what, int value) {
    if (what != 8 || value > 99 * 1024) return 1;
    ((Function*)f)->most = value;
    return 0;
}
// A tensor holds what it was made of, and the sum of that.
API int cuTensorMapEncodeTiled(uint64_t* tensor, int type, unsigned rank, void* at, const uint64_t* dims, const uint64_t* pitches, const unsigned* box,
                               const unsigned* steps, int interleave, int swizzle, int promotion, int outside) {
    if (uint64_t(tensor) % 64 || type != 1 || rank != 3 || uint64_t(at) % 16 || interleave != 0 || swizzle != 3 || promotion != 3 || outside != 0) return 1;
    uint64_t sum = 0, what[6] = {uint64_t(at), dims[0], dims[1], dims[2], pitches[0], pitches[1]};
    for (int i = 0; i < 3; i++)
        if (dims[i] == 0 || dims[i] > uint64_t(1) << 32 || box[i] == 0 || box[i] > 256 || steps[i] != 1) return 1;
    for (int i = 0; i < 2; i++)
        if (pitches[i] % 16 || pitches[i] >= uint64_t(1) << 40) return 1;
    if (box[0] * 2 > 128) return 1;
    for (int i = 0; i < 6; i++) tensor[i] = what[i], sum += what[i];
    tensor[15] = sum;
    return 0;
}
// The memory that an address is in, from there on.
Memory memory_at(uint64_t at, bool writable) {
    auto block = live.upper_bound((void*)at);
    if (block == live.begin()) return {};
    --block;
    uint64_t end = uint64_t(block->first) + block->second;
    if (at > end) return {};
    return {(char*)at, end - at, nullptr, new uint32_t[(end - at) / 32 + 2][2](), 0, 0, writable};
}
// A launch in the shim: its arguments are read now, it runs in its turn.
int shim(const Function& function, unsigned blocks, unsigned threads, unsigned shared, void** args) {
    std::string kinds = function.kinds;
    std::vector<std::vector<uint64_t>> words;
    for (size_t i = 0; i < kinds.size(); i++) words.emplace_back((uint64_t*)args[i], (uint64_t*)args[i] + (kinds[i] == 't' ? 16 : 1));
    return queue([=] {
        std::vector<Memory> memories(kinds.size());
        std::vector<Arg> list;
        for (size_t i = 0; i < kinds.size(); i++) {
            const uint64_t* w = words[i].data();
            if (kinds[i] != 'i') memories[i] = memory_at(w[0], kinds[i] == 'w');
            if (kinds[i] == 'i')
                list.push_back({1, nullptr, 0, int64_t(w[0]), nullptr});
            else
                list.push_back({kinds[i] == 't' ? 2 : 0, &memories[i], 0, 0, w + 1});
        }
        char error[512] = "";
        Launch launch = {{blocks, 1, 1}, threads, shared, ++launched, launched, 0, ~0ull, list.data(), error};
        if (function.run(&launch)) std::fprintf(stderr, "%s: %s\n", function.name.c_str(), error), std::abort();
        for (auto& memory : memories) delete[] memory.sectors;
    });
}
API int cuLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void* s, void** args, void** extra) {
    auto& [name, most, run, kinds] = *(Function*)f;
    if (run) return int(shared) > most || extra || !live.count(s) || gy * gz != 1 || by * bz != 1 ? 1 : shim(*(Function*)f, gx, bx, shared, args);
    if (name == "dp_tensor") {
        const uint64_t* tensor = (const uint64_t*)args[0];
        uint64_t sum = 0, *to = *(uint64_t**)args[1];
        for (int i = 0; i < 6; i++) sum += to[i] = tensor[i];
        return uint64_t(tensor) % 64 || sum != tensor[15];
    }
    if (capturing) return 900;
    if (name != "dp_clip" || int(shared) > most || extra || !live.count(s) || gx * gy * gz != 1 || bx != 32 || by * bz != 1) return 1;
    const float* squares = *(const float**)args[0];
    float* out = *(float**)args[1];
    const double* scalars = *(const double**)args[2];
    double scale = scalars[7] / (std::sqrt(double(*squares)) + 1e-6);
    *out = float(scale < 1 ? scale : 1);
    return 0;
}
API int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t n, void*) { return queue([=] { std::memcpy((void*)to, from, n); }); }
API int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t n, void*) { return queue([=] { std::memcpy(to, (const void*)from, n); }); }
API int cuMemcpy2DAsync_v2(const Copy2D* c, void*) {
    if (c->fkind != 2 || c->tkind != 2 || c->fx || c->fy || c->tx || c->ty) return 1;
    return queue([c = *c] {
        for (size_t r = 0; r < c.height; r++) std::memcpy((char*)c.to + r * c.tpitch, (const char*)c.from + r * c.fpitch, c.width);
    });
}
API int cuMemsetD8Async(uint64_t p, unsigned char v, size_t n, void*) { return queue([=] { std::memset((void*)p, v, n); }); }
API int cuLaunchHostFunc(void* s, void (*function)(void*), void* data) { return live.count(s) ? queue([=] { function(data); }) : 400; }
API int cuStreamBeginCapture_v2(void* s, int mode) {
    if (!live.count(s) || mode != 2 || capturing) return 1;
    capturing = new (take(sizeof(Graph))) Graph;
    return 0;
}
API int cuStreamEndCapture(void* s, void** graph) {
    if (!live.count(s) || !capturing) return 1;
    *graph = capturing;
    capturing = nullptr;
    return 0;
}
API int cuGraphInstantiateWithFlags(void** made, void* graph, uint64_t flags) {
    *made = new (take(sizeof(Graph))) Graph(*(Graph*)graph);
    return flags == 0 ? 0 : 1;
}
int destroy(void* graph) {
    if (!live.count(graph)) return 1;
    ((Graph*)graph)->~Graph();
    return give(graph);
}
API int cuGraphDestroy(void* graph) { return destroy(graph); }
API int cuGraphExecDestroy(void* graph) { return destroy(graph); }
API int cuGraphLaunch(void* graph, void* s) {
    if (!live.count(graph) || !live.count(s)) return 400;
    for (auto& work : ((Graph*)graph)->work) work();
    return 0;
}
API int cuGetErrorName(int e, const char** name) { *name = e == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_UNKNOWN"; return 0; }

API int ncclGetUniqueId(Id* id) { std::memset(id, 0x5a, sizeof *id); return 0; }
API int ncclCommInitRankConfig(void** c, int n, Id id, int rank, const Config* config) {
    if (rank >= n || id.bytes[0] != 0x5a || id.bytes[127] != 0x5a) return 4;
    if (config->size != sizeof(Config) || config->magic != 0xcafebeef || config->blocking != 0) return 4;
    *c = take(1);
    return 7;
}
API int ncclCommSplit(void* c, int color, int key, void** part, const Config*) {
    if (!live.count(c)) return 4;
    *part = color < 0 ? nullptr : take(1);
    color_of_split = color, key_of_split = key;
    if (color == 13) stuck = *part;
    return 0;
}
API int ncclCommGetAsyncError(void* c, int* state) { *state = !live.count(c) ? 3 : c == stuck ? 7 : 0; return 0; }
API int ncclCommFinalize(void* c) { return live.count(c) ? 0 : 4; }
API int ncclCommDestroy(void* c) { return give(c) ? 4 : 0; }
API int ncclCommAbort(void* c) { if (c == stuck) stuck = nullptr; return give(c) ? 4 : 0; }
API int ncclAllReduce(const void* from, void* to, size_t n, int dtype, int op, void*, void*) { std::memmove(to, from, n * size_of(dtype)); return op == 0 || op == 2 ? 0 : 4; }
API int ncclReduceScatter(const void* from, void* to, size_t n, int dtype, int op, void*, void*) { std::memmove(to, from, n * size_of(dtype)); return op == 0 || op == 2 ? 0 : 4; }
API int ncclAllGather(const void* from, void* to, size_t n, int dtype, void*, void*) { std::memmove(to, from, n * size_of(dtype)); return 0; }
// In a group, what is sent to oneself is received.
static bool grouped = false;
static const void* sent = nullptr;
API int ncclGroupStart() { grouped = true, sent = nullptr; return 0; }
API int ncclGroupEnd() { bool was = grouped; grouped = false; return was ? 0 : 5; }
API int ncclCommCount(void*, int* n) { *n = 1; return 0; }
API int ncclCommUserRank(void*, int* rank) { *rank = 0; return 0; }
API int ncclSend(const void* from, size_t, int, int peer, void*, void*) { sent = from; return peer == 0 ? 0 : 4; }
API int ncclRecv(void* to, size_t n, int dtype, int, void*, void*) { if (grouped) std::memmove(to, sent, n * size_of(dtype)); return 0; }
