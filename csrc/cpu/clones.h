// Plain loops, vectorised by the compiler for each of these instruction sets. The library chooses one when it is
// loaded. Older compilers and other machines get one version, for the architecture that they were asked for.
#pragma once

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define SWD_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define SWD_CLONES
#endif
