// A stand-in for NVRTC, which makes of a kernel's text a library of the CPU shim, and in the place of machine code gives the path of that.
//
// `STAND_IN_FOLDER` is where libraries are kept, and where `host.h` is, the prelude of the shim. `STAND_IN_PRELUDE` is the length of the prelude that texts begin with for a GPU. The compiler is `CXX`, with `STAND_IN_FLAGS`.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <set>
#include <string>
#include <unistd.h>

#define API extern "C" __attribute__((visibility("default")))

namespace {
struct Program { std::string text, log, path; };
std::string variable(const char* name) {
    const char* value = std::getenv(name);
    return value ? value : "";
}
int give(const std::string& what, char* to) { std::memcpy(to, what.c_str(), what.size() + 1); return 0; }
// What each kernel takes: memory to read or write, an integer, or a tensor.
const char* KINDS = R"(
template <class T> struct Kind { static constexpr char of = 'i'; };
template <class T> struct Kind<dp::Global<T>> { static constexpr char of = 'w'; };
template <class T> struct Kind<dp::Global<const T>> { static constexpr char of = 'r'; };
template <> struct Kind<dp::TensorMap> { static constexpr char of = 't'; };
template <class... A> struct Kinds { static constexpr char of[] = {Kind<A>::of..., 0}; };
template <class... A> const char* kinds(void (*)(A...)) { return Kinds<A...>::of; }
)";
}

API int nvrtcVersion(int* major, int* minor) { *major = 1; *minor = 0; return 0; }
API const char* nvrtcGetErrorString(int status) { return status ? "the compiler refused it" : "no error"; }
API int nvrtcCreateProgram(Program** p, const char* text, const char*, int, const char* const*, const char* const*) {
    size_t prelude = std::strtoul(variable("STAND_IN_PRELUDE").c_str(), nullptr, 10);
    if (std::strlen(text) < prelude) return 1;
    *p = new Program{text + prelude, "", ""};
    return 0;
}
API int nvrtcDestroyProgram(Program** p) { delete *p; *p = nullptr; return 0; }
API int nvrtcCompileProgram(Program* p, int, const char* const*) {
    std::string folder = variable("STAND_IN_FOLDER"), compiler = variable("CXX");
    std::string name = folder + "/k" + std::to_string(std::hash<std::string>()(p->text)), own = name + "." + std::to_string(getpid());
    p->path = name + ".so";
    if (access(p->path.c_str(), R_OK) == 0) return 0;
    std::string all = "#include \"host.h\"\nnamespace kernel {\n" + p->text + "}\n" + KINDS;
    std::set<std::string> kernels;
    for (const char* begin : {"DP_KERNEL(", "DP_KERNEL_ALONE("})
        for (size_t at = p->text.find(begin); at != std::string::npos; at = p->text.find(begin, at + 1)) {
            size_t from = at + std::strlen(begin);
            kernels.insert(p->text.substr(from, p->text.find(')', from) - from));
        }
    for (auto& k : kernels)
        all += "DP_ENTRY(" + k + "_run, kernel::" + k + ")\nextern \"C\" { const char* " + k + "_kinds = kinds(&kernel::" + k + "); }\n";
    std::ofstream(own + ".cpp") << all;
    std::string command = compiler + " " + variable("STAND_IN_FLAGS") + " -shared -I" + folder + " " + own + ".cpp -o " + own + ".so 2> " + own + ".log";
    int status = std::system(command.c_str());
    std::ifstream log(own + ".log");
    p->log.assign(std::istreambuf_iterator<char>(log), {});
    for (auto& k : kernels) p->log += "ptxas info    : Compiling entry function '" + k + "' for 'sm_80'\nptxas info    : Function properties for " + k +
        "\n    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nptxas info    : Used 32 registers\n";
    if (status == 0) std::rename((own + ".so").c_str(), p->path.c_str());
    for (const char* ending : {".cpp", ".log"}) std::remove((own + ending).c_str());
    return status ? 6 : 0;
}
API int nvrtcGetProgramLogSize(Program* p, size_t* n) { *n = p->log.size() + 1; return 0; }
API int nvrtcGetProgramLog(Program* p, char* to) { return give(p->log, to); }
API int nvrtcGetCUBINSize(Program* p, size_t* n) { *n = p->path.size() + 5; return 0; }
API int nvrtcGetCUBIN(Program* p, char* to) { return give("\x7f" "ELF" + p->path, to); }
API int nvrtcGetPTXSize(Program*, size_t* n) { *n = 1; return 0; }
API int nvrtcGetPTX(Program*, char* to) { *to = 0; return 0; }
