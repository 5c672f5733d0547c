"""A user's own x: what is converted, with which note, and what is refused, in which words."""

from __future__ import annotations

import numpy as np
import pytest

from accel_nb.data import load
from accel_nb.errors import DataError

RNG = np.random.default_rng(0)
Y = np.arange(40) % 4


def features(*shape, dtype=np.float32):
    return RNG.random((40, *shape)).astype(dtype)


def pixels(*shape, top=255, dtype=np.uint8):
    x = RNG.integers(0, top + 1, (40, *shape)).astype(dtype)
    x.flat[0] = top  # the range is really used
    return x


def refusal(data, **kwargs) -> DataError:
    with pytest.raises(DataError) as caught:
        load(data, **kwargs)
    return caught.value


def one(dataset):
    """All of x in the original order (loaded with validation=0)."""
    assert dataset.val_samples == 0
    return dataset.x_train


@pytest.mark.parametrize("dtype", ["float64", "float16", "int8", "int32", "int64", "bool", ">f4", "uint16"])
def test_other_types_become_float32_with_a_note(dtype):
    x = RNG.integers(0, 2, (40, 5)).astype(dtype)
    dataset = load((x, Y), validation=0)
    assert one(dataset).dtype == np.float32
    np.testing.assert_array_equal(one(dataset), x.astype(np.float32))
    assert dataset.scale == 1.0
    assert any(f"{np.dtype(dtype)} was converted to float32" in note for note in dataset.notes)


def test_float32_features_stay_as_they_are_without_a_copy_or_a_note():
    x = features(5)
    dataset = load((x, Y), validation=0)
    assert one(dataset) is x
    assert dataset.notes == ()


def test_byte_images_are_kept_as_bytes_to_be_divided_by_255():
    x = pixels(6, 6, 3)
    dataset = load((x, Y), validation=0)
    assert one(dataset) is x
    assert dataset.scale == 255.0
    assert "pixels from 0 to 255, kept as bytes" in dataset.notes[0]


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_whole_numbers_from_0_to_255_in_the_shape_of_pictures_are_pixels(dtype):
    x = pixels(6, 6, 1, dtype=dtype)
    dataset = load((x, Y), validation=0)
    assert one(dataset).dtype == np.uint8
    np.testing.assert_array_equal(one(dataset), x)
    assert dataset.scale == 255.0
    assert f"stored as bytes instead of {dtype}" in dataset.notes[0]


def test_pictures_of_few_grey_levels_are_divided_by_their_largest_value():
    dataset = load((pixels(8, 8, 1, top=16), Y), validation=0)
    assert dataset.scale == 16.0
    assert "divides them by 16" in dataset.notes[0]
    assert '"scale"' in dataset.notes[0]


def test_pictures_of_0_and_1_are_numbers_already():
    dataset = load((pixels(8, 8, 1, top=1), Y), validation=0)
    assert one(dataset).dtype == np.float32
    assert dataset.scale == 1.0


@pytest.mark.parametrize(
    ("count", "stored"), [(784, np.uint8), (3072, np.uint8), (64, np.uint8), (70, np.float32)]
)
def test_rows_of_pixels_stay_rows(count, stored):
    dataset = load((pixels(count), Y), validation=0)
    assert dataset.input_shape == (count,)
    assert one(dataset).dtype == stored


def test_the_scale_can_be_said():
    x = pixels(8, 8, 1, top=16)
    dataset = load((x, Y), validation=0, data_args={"scale": 32})
    assert (dataset.scale, one(dataset).dtype) == (32.0, np.uint8)
    # Divided by one means: as they are. A program leaves the division out then, and with it the cast.
    dataset = load((x, Y), validation=0, data_args={"scale": 1})
    assert (dataset.scale, one(dataset).dtype) == (1.0, np.float32)
    x = features(8, 8, 1) * 255
    dataset = load((x, Y), validation=0, data_args={"scale": 255})
    assert (dataset.scale, one(dataset).dtype) == (255.0, np.float32)


def test_fractions_up_to_255_in_pictures_are_refused_with_both_ways_out():
    error = refusal((features(8, 8, 1) * 255, Y))
    assert "pixels of 0 to 255, or quantities" in str(error)
    assert '{"scale": 255}' in error.do
    assert '{"scale": 1}' in error.do


def test_train_and_validation_must_be_scaled_alike():
    train, val = pixels(6, 6, 1), pixels(6, 6, 1) / np.float32(255)
    for data in ((train, Y, val, Y), (val, Y, train, Y)):
        assert "one is scaled to 0..1, the other is not" in refusal(data).why


def test_validation_decides_with_training_on_how_x_is_stored():
    train, val = pixels(8, 8, 1, top=16), pixels(8, 8, 1, top=20)
    dataset = load((train, Y, val, Y))
    assert dataset.scale == 20.0
    assert dataset.x_val.dtype == dataset.x_train.dtype == np.uint8


def test_large_values_are_told():
    dataset = load((features(5) * 1e6, Y))
    assert "networks learn best" in dataset.notes[0]


def test_whole_numbers_that_float32_rounds_are_told():
    x = np.full((40, 2), 2**24 + 1)
    assert "beyond 16,777,216 are rounded" in " ".join(load((x, Y)).notes)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_channels_first_are_moved_last(channels):
    x = features(channels, 6, 7)
    dataset = load((x, Y), validation=0)
    assert dataset.input_shape == (6, 7, channels)
    np.testing.assert_array_equal(one(dataset), x.transpose(0, 2, 3, 1))
    assert "moved from first to last" in dataset.notes[0]


@pytest.mark.parametrize("shape", [(6, 7, 1), (6, 7, 3), (6, 7, 4), (1, 1, 1), (28, 28, 12)])
def test_channels_last_stay(shape):
    dataset = load((features(*shape), Y), validation=0)
    assert dataset.input_shape == shape
    assert dataset.notes == ()


@pytest.mark.parametrize("shape", [(3, 32, 3), (1, 28, 1), (3, 3, 3), (3, 6, 1), (12, 28, 28), (28, 28, 28)])
def test_unclear_channels_are_refused_and_can_be_said(shape):
    x = features(*shape)
    error = refusal((x, Y))
    assert "np.moveaxis(x, 1, -1)" in error.do
    assert load((x, Y), data_args={"channels": "last"}).input_shape == shape
    first = load((x, Y), data_args={"channels": "first"}, validation=0)
    np.testing.assert_array_equal(one(first), np.moveaxis(x, 1, -1))


def test_grey_images_without_a_channel_get_one():
    dataset = load((features(9, 8), Y), validation=0)
    assert dataset.input_shape == (9, 8, 1)
    assert "a channel was added" in dataset.notes[0]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_counted_and_the_first_one_is_shown(value):
    x = features(3, 6, 7)  # channels first: the place is given as in the array that was passed
    x[7, 2, 3, 4] = x[9, 0, 0, 0] = value
    error = refusal((x, Y))
    assert f"2 values are not finite; the first is x[7, 2, 3, 4] = {value}" in error.why
    x[9] = 0
    assert "1 value is not finite" in refusal((x, Y)).why
    x_val = np.zeros_like(x)
    x_val[-1, -1, -1, -1] = value
    assert refusal((np.zeros_like(x), Y, x_val, Y)).field == "x_val"


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (np.zeros(40), "one dimension"),
        (np.float32(1), "single value"),
        (np.zeros((0, 5)), "no samples"),
        (np.zeros((40, 0)), "samples are empty"),
        (np.zeros((40, 4, 0, 3)), "samples are empty"),
        (np.zeros((40, 2, 2, 2, 2)), "4 dimensions"),
        (np.zeros((40, 2), complex), "Complex"),
        (np.zeros((40, 2), object), "Python objects"),
        (np.full((40, 2), "a"), "text"),
        (np.full((40, 2), b"a"), "text"),
        (np.zeros((40, 2), "M8[D]"), "dates"),
        (np.zeros((40, 2), "m8[s]"), "time spans"),
        (np.zeros((40, 2), [("a", int)]), "are not numbers"),
        (np.full((40, 2), 1e300), "more than float32 can hold"),
        ([[1, 2], [3]] * 20, "different lengths"),
        ([[1, "a"]] * 40, "mixes text and numbers"),
        ([[None, 1]] * 40, "Python objects"),
        ([], "no samples"),
        (None, "NoneType is not an array"),
        ("abc", "str is not an array"),
        ({1, 2}, "set is not an array"),
        ({"a": 1}, "dict is not an array"),
        (iter([1]), "iterator is not an array"),
        (np.ma.masked_less(np.arange(80.0).reshape(40, 2), 3), "3 of its values are masked"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else "",
)
def test_x_that_no_model_should_see(x, words):
    error = refusal((x, Y))
    assert error.field == "x"
    assert words in error.why


def test_the_shape_of_x_val_must_be_that_of_x():
    error = refusal((features(5), Y, features(6), Y))
    assert (error.field, error.why) == ("x_val", "Its samples have the shape 6, those of x 5.")


def test_the_users_arrays_are_not_written_to():
    x, y = pixels(3, 6, 7), Y.copy()
    x.flags.writeable = y.flags.writeable = False
    before = x.copy()
    dataset = load((x, y))
    dataset.x_train[:] = 0
    np.testing.assert_array_equal(x, before)
