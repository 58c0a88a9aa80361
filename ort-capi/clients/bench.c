/* Times calls of a library with ONNX Runtime's C API.
   Arguments: the library, and a model of one addition of three floats, x + x = y. */

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* Functions by their index in the table, which never changes. */
enum {
  CREATE_ENV = 3, CREATE_SESSION = 7, RUN = 9, CREATE_OPTIONS = 10, SET_INTRA = 24, CREATE_TENSOR = 49,
  TYPE_AND_SHAPE = 65, CREATE_MEMORY = 69, RELEASE_SESSION = 95, RELEASE_VALUE = 96, RELEASE_SHAPE = 99,
  RUN_BINDING = 133, CREATE_BINDING = 134, BIND_INPUT = 136, BIND_OUTPUT = 137
};

typedef void *(*function)();
static function *table;

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1e6 + time.tv_nsec / 1e3;
}

static void check(void *status, const char *what) {
  if (status) {
    fprintf(stderr, "%s: %s\n", what, ((const char *(*)(void *))table[2])(status));
    exit(1);
  }
}

static int by_size(const void *one, const void *other) {
  double difference = *(const double *)one - *(const double *)other;
  return (difference > 0) - (difference < 0);
}

enum { BLOCKS = 15, CALLS = 2000 };

/* Prints the least and the median microseconds of a call, over blocks of calls. */
#define TIME(name, calls, ...)                                               \
  do {                                                                       \
    double blocks[BLOCKS];                                                   \
    for (int block = 0; block < BLOCKS; block++) {                           \
      double start = now();                                                  \
      for (int call = 0; call < (calls); call++) { __VA_ARGS__ }             \
      blocks[block] = (now() - start) / (calls);                             \
    }                                                                        \
    qsort(blocks, BLOCKS, sizeof(double), by_size);                          \
    printf("%-16s %10.2f %10.2f\n", name, blocks[0], blocks[BLOCKS / 2]);    \
  } while (0)

int main(int count, char **arguments) {
  if (count < 3) return 2;
  void *library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  if (!library) { fprintf(stderr, "%s\n", dlerror()); return 1; }
  void **base = ((void **(*)(void))dlsym(library, "OrtGetApiBase"))();
  table = (function *)((void *(*)(uint32_t))base[0])(22);
  void *env, *options, *memory, *session, *binding, *x, *y, *shape;
  double start = now();
  check(table[CREATE_ENV](3, "bench", &env), "env");
  printf("%-16s %10.2f %10.2f\n", "CreateEnv", now() - start, now() - start);
  check(table[CREATE_OPTIONS](&options), "options");
  check(table[SET_INTRA](options, 1), "threads");
  check(table[CREATE_MEMORY](0, 0, &memory), "memory");
  TIME("CreateSession", 1, {
    check(table[CREATE_SESSION](env, arguments[2], options, &session), "session");
    table[RELEASE_SESSION](session);
  });
  check(table[CREATE_SESSION](env, arguments[2], options, &session), "session");
  float input[3] = {1, 2, 3}, output[3];
  int64_t dims[1] = {3};
  const char *input_name = "x", *output_name = "y";
  check(table[CREATE_TENSOR](memory, input, sizeof input, dims, (size_t)1, 1, &x), "x");
  check(table[CREATE_TENSOR](memory, output, sizeof output, dims, (size_t)1, 1, &y), "y");
  TIME("Run, made", CALLS, {
    void *made = 0;
    check(table[RUN](session, (void *)0, &input_name, &x, (size_t)1, &output_name, (size_t)1, &made), "run");
    table[RELEASE_VALUE](made);
  });
  TIME("Run, given", CALLS, {
    check(table[RUN](session, (void *)0, &input_name, &x, (size_t)1, &output_name, (size_t)1, &y), "run");
  });
  check(table[CREATE_BINDING](session, &binding), "binding");
  check(table[BIND_INPUT](binding, "x", x), "bind");
  check(table[BIND_OUTPUT](binding, "y", y), "bind");
  TIME("RunWithBinding", CALLS, { check(table[RUN_BINDING](session, (void *)0, binding), "run"); });
  TIME("CreateTensor", CALLS, {
    void *made;
    check(table[CREATE_TENSOR](memory, input, sizeof input, dims, (size_t)1, 1, &made), "tensor");
    table[RELEASE_VALUE](made);
  });
  TIME("GetTypeAndShape", CALLS, {
    check(table[TYPE_AND_SHAPE](x, &shape), "shape");
    table[RELEASE_SHAPE](shape);
  });
  if (output[0] != 2 || output[1] != 4 || output[2] != 6) {
    fprintf(stderr, "wrong: %f %f %f\n", output[0], output[1], output[2]);
    return 1;
  }
  return 0;
}
