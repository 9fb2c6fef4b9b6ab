/* The inner loop of copying.py: copies that threads share out among them, without the GIL.

   It is optional. Where there was no compiler at installation, copying.py does the same with memmove. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#if defined(__SSE2__)
#include <emmintrin.h>

/* Past the caches: a plain store reads the line that it is about to overwrite, which for large copies is a third
   of all traffic to memory. */
static void stream(char *to, const char *from, size_t n)
{
    size_t head = -(uintptr_t)to & 63;
    if (n < 256 + head) {
        memcpy(to, from, n);
        return;
    }
    memcpy(to, from, head);
    to += head, from += head, n -= head;
    for (; n >= 64; n -= 64, to += 64, from += 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)from);
        __m128i b = _mm_loadu_si128((const __m128i *)(from + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(from + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(from + 48));
        _mm_stream_si128((__m128i *)to, a);
        _mm_stream_si128((__m128i *)(to + 16), b);
        _mm_stream_si128((__m128i *)(to + 32), c);
        _mm_stream_si128((__m128i *)(to + 48), d);
    }
    memcpy(to, from, n);
}

/* Streamed stores are not ordered with others; whoever learns that the copy is done must see it. */
static void finish(void) { _mm_sfence(); }

#else

static void stream(char *to, const char *from, size_t n) { memcpy(to, from, n); }
static void finish(void) {}

#endif

/* A job is an array of 64-bit numbers: how many copies were begun, how many there are, whether to stream, how many
   threads are at it, and for each copy where to, where from, how many bytes. Every thread takes the next copy. */
enum { BEGUN, COUNT, STREAM, WORKING, FIRST };

/* Until no other thread is in the middle of a copy; mostly that is at once, or as long as one copy takes. */
static void wait_for_others(int64_t *numbers)
{
    const struct timespec moment = {0, 50000};
    for (int turns = 0; __atomic_load_n(&numbers[WORKING], __ATOMIC_SEQ_CST) > 0; turns++) {
        if (turns < 1000)
            sched_yield();
        else
            nanosleep(&moment, NULL);
    }
}

static PyObject *work(PyObject *module, PyObject *args)
{
    PyObject *job;
    int waits;
    Py_buffer view;
    if (!PyArg_ParseTuple(args, "Op", &job, &waits) || PyObject_GetBuffer(job, &view, PyBUF_WRITABLE) < 0)
        return NULL;
    int64_t *numbers = view.buf;
    int64_t room = view.len / 8 - FIRST;
    if (room < 0 || numbers[COUNT] < 0 || numbers[COUNT] > room / 3) {
        PyBuffer_Release(&view);
        PyErr_SetString(PyExc_ValueError, "the job has not as many copies as it says");
        return NULL;
    }
    int64_t count = numbers[COUNT], place;
    int streaming = numbers[STREAM] != 0;
    /* Nothing can interrupt this: when it returns, the memory is nobody's business any more. */
    Py_BEGIN_ALLOW_THREADS
    __atomic_fetch_add(&numbers[WORKING], 1, __ATOMIC_SEQ_CST);
    while ((place = __atomic_fetch_add(&numbers[BEGUN], 1, __ATOMIC_SEQ_CST)) < count) {
        const int64_t *copy = numbers + FIRST + 3 * place;
        if (streaming)
            stream((char *)copy[0], (const char *)copy[1], (size_t)copy[2]);
        else
            memcpy((char *)copy[0], (const char *)copy[1], (size_t)copy[2]);
    }
    if (streaming)
        finish();
    __atomic_fetch_sub(&numbers[WORKING], 1, __ATOMIC_SEQ_CST);
    if (waits)
        wait_for_others(numbers);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"work", work, METH_VARARGS, "Make the copies of a job that nobody has begun; wait for those who have."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_copy", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__copy(void) { return PyModuleDef_Init(&module); }
