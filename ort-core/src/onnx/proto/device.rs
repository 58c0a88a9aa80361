//! Multi-device annotations (IR version 11 and later). They are preserved and have no effect here.

/// A named set of devices.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DeviceConfigurationProto {
    /// The configuration's name.
    #[prost(string, optional, tag = "1")]
    pub name: Option<String>,
    /// The number of devices.
    #[prost(int32, optional, tag = "2")]
    pub num_devices: Option<i32>,
    /// The names of the devices.
    #[prost(string, repeated, tag = "3")]
    pub device: Vec<String>,
}

/// How one node uses a configuration.
#[derive(Clone, PartialEq, prost::Message)]
pub struct NodeDeviceConfigurationProto {
    /// The configuration's name.
    #[prost(string, optional, tag = "1")]
    pub configuration_id: Option<String>,
    /// The sharding of its inputs and outputs.
    #[prost(message, repeated, tag = "2")]
    pub sharding_spec: Vec<ShardingSpecProto>,
    /// The pipeline stage of the node.
    #[prost(int32, optional, tag = "3")]
    pub pipeline_stage: Option<i32>,
}

/// The sharding of one tensor.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ShardingSpecProto {
    /// The tensor.
    #[prost(string, optional, tag = "1")]
    pub tensor_name: Option<String>,
    /// The devices. Negative numbers name groups.
    #[prost(int64, repeated, packed = "false", tag = "2")]
    pub device: Vec<i64>,
    /// The devices in each group.
    #[prost(message, repeated, tag = "3")]
    pub index_to_device_group_map: Vec<IntIntListEntryProto>,
    /// The sharding of each axis.
    #[prost(message, repeated, tag = "4")]
    pub sharded_dim: Vec<ShardedDimProto>,
}

/// An integer and a list of integers.
#[derive(Clone, PartialEq, prost::Message)]
pub struct IntIntListEntryProto {
    /// The key.
    #[prost(int64, optional, tag = "1")]
    pub key: Option<i64>,
    /// The list.
    #[prost(int64, repeated, packed = "false", tag = "2")]
    pub value: Vec<i64>,
}

/// The sharding of one axis.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ShardedDimProto {
    /// The axis; negative values count from the back.
    #[prost(int64, optional, tag = "1")]
    pub axis: Option<i64>,
    /// The parts, whose product is the axis size.
    #[prost(message, repeated, tag = "2")]
    pub simple_sharding: Vec<SimpleShardedDimProto>,
}

/// One part of an axis.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SimpleShardedDimProto {
    /// The number of shards.
    #[prost(int64, optional, tag = "3")]
    pub num_shards: Option<i64>,
    /// The size of the part.
    #[prost(oneof = "simple_sharded_dim_proto::Dim", tags = "1, 2")]
    pub dim: Option<simple_sharded_dim_proto::Dim>,
}

/// The `oneof` of [`SimpleShardedDimProto`].
pub mod simple_sharded_dim_proto {
    /// A size as a number or name.
    #[derive(Clone, PartialEq, prost::Oneof)]
    pub enum Dim {
        /// A number.
        #[prost(int64, tag = "1")]
        DimValue(i64),
        /// A name.
        #[prost(string, tag = "2")]
        DimParam(String),
    }
}
