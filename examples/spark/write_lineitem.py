"""Spark writes TPC-H `lineitem` into a cache; no file lies between them.

    spark-submit examples/spark/write_lineitem.py s3a://warehouse/tpch/lineitem/

The cache is that of CACHE_ENDPOINT.
"""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession

from cache_client.engines.spark_source import CacheDataSource


def write_lineitem(spark: SparkSession, source: str) -> None:
    """Writes the dataset ``lineitem``, from Parquet files; all of its rows, or none."""
    spark.dataSource.register(CacheDataSource)
    rows = spark.read.parquet(source).selectExpr(
        "l_orderkey * 8 + l_linenumber AS row_key",
        "CAST(l_quantity AS FLOAT) / 50 AS quantity",
        "CAST(l_discount AS FLOAT) * 10 AS discount",
        "CAST(l_extendedprice AS FLOAT) / 50000 AS price",
    )
    rows.write.format("trainer-data-cache").mode("overwrite").option("name", "lineitem").save()


if __name__ == "__main__":
    write_lineitem(SparkSession.builder.getOrCreate(), sys.argv[1])
