/* The two functions of scan.py, which says what they do; tests give both the same bytes.

   Everything is checked against the end of the read, the arguments' types included. Nothing is kept between calls. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000 /* Python 3.11: one build serves it and all later ones */
#include <Python.h>
#include <string.h>

#define RECORD ": pdproxy [1,"
#define RECORD_SIZE ((Py_ssize_t)(sizeof RECORD - 1))
#define COUNT_SIZE 3 /* of its end, "[1,", with which the kept record begins */
#define MOST_DIGITS 15 /* of a size in hexadecimal: more would be beyond what a Py_ssize_t holds */

typedef struct {
    const char *at, *end;
} Bytes;

static int is_bytes(PyObject *value, Bytes *found)
{
    char *at;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(value, &at, &size) < 0)
        return 0;
    found->at = at;
    found->end = at + size;
    return 1;
}

static int begins(Bytes text, const char *with, Py_ssize_t size)
{
    return text.end - text.at >= size && memcmp(text.at, with, (size_t)size) == 0;
}

/* The content of the only chunk of a read; at == NULL where it is not one chunk. */
static Bytes content_of(Bytes read)
{
    const Bytes none = {NULL, NULL};
    const char *at = read.at;
    Py_ssize_t size = 0;
    while (at < read.end && at - read.at < MOST_DIGITS) {
        if (*at >= '0' && *at <= '9')
            size = size * 16 + (*at - '0');
        else if (*at >= 'a' && *at <= 'f')
            size = size * 16 + (*at - 'a' + 10);
        else
            break;
        at++;
    }
    if (size == 0 || *read.at == '0' || read.end - at - 4 != size)
        return none;
    if (memcmp(at, "\r\n", 2) != 0 || memcmp(read.end - 2, "\r\n", 2) != 0)
        return none;
    return (Bytes){at + 2, read.end - 2};
}

/* Where an event like the last one ends that begins the content; NULL where it is not such an event. */
static const char *event_end(Bytes content, Bytes head, Bytes tail)
{
    const Py_ssize_t head_size = head.end - head.at, tail_size = tail.end - tail.at;
    if (content.at == NULL || !begins(content, head.at, head_size))
        return NULL;
    content.at += head_size;
    content.at = memchr(content.at, '"', (size_t)(content.end - content.at));
    if (content.at == NULL)
        return NULL;
    content.at++;
    return begins(content, tail.at, tail_size) ? content.at + tail_size : NULL;
}

static PyObject *plain(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    Bytes read, head, tail, content;
    (void)module;
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "plain takes 3 arguments");
        return NULL;
    }
    if (!is_bytes(args[0], &read) || !is_bytes(args[1], &head) || !is_bytes(args[2], &tail))
        return NULL;
    content = content_of(read);
    return Py_NewRef(content.at != NULL && event_end(content, head, tail) == content.end ? args[0] : Py_None);
}

/* A chunk of HTTP/1.1. */
static PyObject *chunk_of(const char *event, Py_ssize_t size)
{
    Py_ssize_t digits = 1;
    PyObject *chunk;
    char *at;
    while (size >> (4 * digits))
        digits++;
    chunk = PyBytes_FromStringAndSize(NULL, digits + size + 4);
    if (chunk == NULL || (at = PyBytes_AsString(chunk)) == NULL)
        return NULL;
    for (Py_ssize_t digit = digits; digit-- > 0;)
        *at++ = "0123456789abcdef"[size >> (4 * digit) & 15];
    memcpy(at, "\r\n", 2);
    memcpy(at + 2, event, (size_t)size);
    memcpy(at + 2 + size, "\r\n", 2);
    return chunk;
}

/* Append a record, and a comma: 1. 0 where they would become too long, -1 with an exception. */
static int keep(PyObject *records, Bytes record, Py_ssize_t most)
{
    const Py_ssize_t before = PyByteArray_Size(records), added = record.end - record.at;
    char *at;
    if (most < added || before >= most - added)
        return 0;
    if (PyByteArray_Resize(records, before + added + 1) < 0)
        return -1;
    at = PyByteArray_AsString(records) + before;
    memcpy(at, record.at, (size_t)added);
    at[added] = ',';
    return 1;
}

/* The record that commits one event, where it is all that is left of the content; at == NULL where it is not. */
static Bytes record_of(Bytes rest)
{
    const Bytes none = {NULL, NULL};
    const char *found;
    if (!begins(rest, RECORD, RECORD_SIZE) || rest.end - rest.at < RECORD_SIZE + 2)
        return none;
    found = rest.at + RECORD_SIZE;
    while ((found = memchr(found, '\n', (size_t)(rest.end - 1 - found))) != NULL && found[1] != '\n')
        found++;
    return found == rest.end - 2 ? (Bytes){rest.at + RECORD_SIZE - COUNT_SIZE, found} : none;
}

static PyObject *journaled(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    Bytes read, head, tail, content, record = {NULL, NULL};
    const char *end;
    Py_ssize_t most;
    PyObject *chunk;
    int kept;
    (void)module;
    if (count != 5 || !PyByteArray_Check(args[3])) {
        PyErr_SetString(PyExc_TypeError, "journaled takes 5 arguments, the fourth a bytearray");
        return NULL;
    }
    if (!is_bytes(args[0], &read) || !is_bytes(args[1], &head) || !is_bytes(args[2], &tail))
        return NULL;
    if ((most = PyLong_AsSsize_t(args[4])) == -1 && PyErr_Occurred())
        return NULL;
    content = content_of(read);
    end = event_end(content, head, tail);
    if (end != NULL)
        record = record_of((Bytes){end, content.end});
    if (record.at == NULL)
        return Py_NewRef(Py_None);
    if ((chunk = chunk_of(content.at, end - content.at)) == NULL)
        return NULL;
    kept = keep(args[3], record, most);
    if (kept == 1)
        return chunk;
    Py_DecRef(chunk);
    return kept < 0 ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef functions[] = {
    {"plain", (PyCFunction)(void (*)(void))plain, METH_FASTCALL, NULL},
    {"journaled", (PyCFunction)(void (*)(void))journaled, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static PyModuleDef_Slot slots[] = {{0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_scan", NULL, 0, functions, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__scan(void)
{
    return PyModuleDef_Init(&definition);
}
